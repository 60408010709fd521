"""C code of the package, compiled for this machine when it is first used and kept in the user's cache folder."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from importlib.resources import files
from pathlib import Path

NO_COMPILER = "ROLLART_NO_COMPILER"  # set to 1 to do without
HEADER = "numbers.h"  # beside this file, for all
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")


@cache
def native_library(package: str, names: Sequence[str], definitions: Sequence[str] = ()) -> ctypes.CDLL | None:
    """The sources `names` of a package as one library, compiled with `definitions` (`DIM=32`). None if there is no
    compiler, or it cannot compile them: whoever asks has another way."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or os.environ.get(NO_COMPILER) == "1":
        return None
    header = files("rollart.core") / HEADER
    sources = [files(package) / name for name in names]
    options = (*FLAGS, *(f"-D{each}" for each in definitions))
    text = [source.read_bytes() for source in (*sources, header)]
    key = blake2b(repr((text, options, compiler, _processor())).encode(), digest_size=8).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollart"
    target = folder / f"{package.rpartition('.')[2]}-{key}.so"
    try:
        if not target.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _compile([compiler, *options, f"-I{Path(str(header)).parent}", *map(str, sources)], target)
        return ctypes.CDLL(str(target))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None


def _compile(command: list[str], target: Path) -> None:
    """With OpenMP if the compiler has it. Processes that start together may all compile; the last to rename wins."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        draft = Path(folder, "library.so")
        for threads in ("-fopenmp", "-fopenmp-simd"):
            done = subprocess.run([*command, threads, "-o", str(draft), "-lm"], capture_output=True, timeout=60)
            if done.returncode == 0:
                draft.replace(target)
                return
    raise OSError("the C compiler cannot compile the package's kernels")


def _processor() -> str:
    """The instructions that `-march=native` may use, for cache folders that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
