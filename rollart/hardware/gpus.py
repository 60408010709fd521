"""The GPUs of this machine, by device class."""

import functools
import re
import shutil
import subprocess

from rollart.core.errors import ServiceError
from rollart.hardware.devices import CATALOGUE

DEADLINE_S = 3.0


@functools.cache
def gpus() -> tuple[str, ...]:
    """The device class of each GPU, in the order of their numbers; none without `nvidia-smi`. Raises ServiceError."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        command = [tool, "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ServiceError(f"nvidia-smi does not list the GPUs of this machine: {error}") from error
    return tuple(class_of(name) for name in names.splitlines() if name.strip())


def class_of(product: str) -> str:
    """`NVIDIA H100 80GB HBM3` is an H100. An unknown product is a class of its own."""
    words = re.findall(r"[A-Za-z0-9]+", product)
    known = {name.lower(): name for name in CATALOGUE}
    for word in words:
        if word.lower() in known:
            return known[word.lower()]
    return "-".join(word for word in words if word != "NVIDIA")
