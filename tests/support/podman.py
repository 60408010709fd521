"""Podman with a store of its own, and an image made from programs of this machine; no registry is asked."""

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

IMAGE = "localhost/rollart-test:1"
PROGRAMS = (
    "bash",
    "cat",
    "chmod",
    "cp",
    "grep",
    "head",
    "id",
    "ln",
    "ls",
    "mkdir",
    "mv",
    "rm",
    "sleep",
    "tar",
    "touch",
)
ENGINE = """\
[engine]
runtime = "{runtime}"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
STORAGE = '[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'


@contextmanager
def podman_image(folder: Path) -> Iterator[str]:
    """Skips the test where podman cannot run containers."""
    runtime = shutil.which("runc") or shutil.which("crun")
    if shutil.which("podman") is None or runtime is None or os.geteuid() != 0:
        pytest.skip("needs podman, runc or crun, and root")
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (("CONTAINERS_CONF", ENGINE), ("CONTAINERS_STORAGE_CONF", STORAGE)):
            file = folder / name.lower()
            file.write_text(text.format(runtime=runtime, folder=folder))
            patch.setenv(name, str(file))
        made = subprocess.run(["podman", "import", root_archive(folder), IMAGE], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        tried = subprocess.run(["podman", "run", "--rm", "--network=none", IMAGE, "id"], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"podman cannot run containers here: {tried.stderr.strip()}")
        yield IMAGE
        subprocess.run(["podman", "system", "reset", "--force"], capture_output=True, timeout=60)


def root_archive(folder: Path) -> str:
    """A root file system of a few programs and the libraries that they load."""
    wanted = {"/bin/sh": shutil.which("bash")}
    for program in PROGRAMS:
        path = os.path.realpath(str(shutil.which(program)))
        wanted[f"/bin/{program}"] = path
        loaded = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        wanted |= {word: os.path.realpath(word) for word in loaded.split() if word.startswith("/")}
    with tarfile.open(folder / "root.tar", "w") as tar:
        for name in ("tmp", "etc", "task", "proc", "dev", "sys"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        for name, source in wanted.items():
            tar.add(str(source), name.lstrip("/"))
    return str(folder / "root.tar")
