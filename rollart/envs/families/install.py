"""Installs and removes families.

The invariants:
- A family is built in another folder, tried out there, and renamed when it works: a folder with its name is complete.
- One process at a time works on a family, by a lock that ends with the process; what a killed one left is deleted.
"""

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import RollartError
from rollart.core.variables import passed
from rollart.envs.families import RECORD, Family, FamilyTrial, InstalledFamily, installed, root
from rollart.envs.single import single_environment

Progress = Callable[[str], None]
VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
QUICK_S, INSTALL_S = 120.0, 1800.0
LAST_LINES = 15


def add(family: Family, progress: Progress, *, python: str | None = None, again: bool = False) -> InstalledFamily:
    """Install the family unless it is there with the same requirements. Raises RollartError."""
    with _lock(family.name):
        there = installed(family.name)
        if there and there.requirements == family.requirements and not again:
            return there
        interpreter, version = _interpreter(family, python)
        building = root() / f".{family.name}-building"
        _remove(building)
        try:
            _build(family, building, interpreter, version, progress)
            _replace(root() / family.name, building)
        finally:
            _remove(building)
    made = installed(family.name)
    if made is None:
        raise RollartError(f"{root() / family.name} was removed while it was installed")
    return made


def remove(name: str) -> None:
    """Raises RollartError if it is not there."""
    with _lock(name):
        if not (root() / name).is_dir():
            raise RollartError(f"the family {name!r} is not installed")
        _replace(root() / name, None)


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    try:
        root().mkdir(parents=True, exist_ok=True)
        lock = (root() / f".{name}.lock").open("w")  # never removed: that would let two in
    except OSError as error:
        raise RollartError(f"families go to {root()}, which cannot be written: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RollartError(f"another `rollart envs` is at work on {name!r}; wait for it to end") from None
        yield


def _build(family: Family, folder: Path, interpreter: str, version: str, progress: Progress) -> None:
    progress(f"creating a Python {version} environment")
    python = str(folder / "bin" / "python")
    # Our own pip, if there is one: a copy in each family would take time and space.
    ours = importlib.util.find_spec("pip") is not None
    venv = [interpreter, "-m", "venv", *(["--without-pip"] if ours else []), str(folder)]
    _run(venv, QUICK_S, f"{interpreter} cannot make a virtual environment", progress)
    requirements = folder / "requirements.txt"
    requirements.write_text(family.requirements)
    pip = [sys.executable, "-m", "pip", "--python", python] if ours else [python, "-m", "pip"]
    options = ["--disable-pip-version-check", "--no-input", *(["--no-deps"] if family.locked else [])]
    install = [*pip, "install", *options, "-r", str(requirements)]
    _run(install, INSTALL_S, f"the packages of {family.name!r} cannot be installed", progress)
    made = InstalledFamily(family.name, folder, version, family.requirements)
    progress("trying it out")
    if family.modules:
        command = [python, "-c", f"import {', '.join(family.modules)}"]
        failure = f"{family.name!r} was installed but does not work, so it was removed"
        _run(command, QUICK_S, failure, progress, passed(os.environ, ()))
    for trial in family.tries:
        asyncio.run(_try_out(made, trial))
    (folder / RECORD).write_text(json.dumps({"version": version, "requirements": family.requirements}))


async def _try_out(made: InstalledFamily, trial: FamilyTrial) -> None:
    """The first turn of an episode, in a worker process as in a run."""
    task = TaskConfig(name="trial", env=trial.env, args=trial.args)
    config = EnvironmentsConfig(processes=1, reset_deadline=QUICK_S, step_deadline=QUICK_S)
    try:
        async with single_environment(task, config, python=str(made.python)) as env:
            await env.reset(0, held_out=False)
            await env.step(trial.action)
    except RollartError as error:
        raise RollartError(f"{made.name!r} was installed but does not work, so it was removed: {error}") from error


def _interpreter(family: Family, chosen: str | None) -> tuple[str, str]:
    """The Python to use and its version. Raises RollartError."""
    if chosen:
        version = _version(chosen)
        if version is None:
            raise RollartError(f"--python {chosen} cannot be run")
        if family.pythons and version not in family.pythons:
            raise RollartError(f"{family.name!r} runs on Python {' or '.join(family.pythons)}; {chosen} is {version}")
        return chosen, version
    if not family.pythons:
        return sys.executable, str(_version(sys.executable))
    for version in family.pythons:
        for candidate in (sys.executable, f"python{version}"):
            if _version(candidate) == version:
                return candidate, version
    raise RollartError(
        f"{family.name!r} needs Python {' or '.join(family.pythons)}, which is not on the PATH; install it, "
        f"or name it: rollart envs add {family.name} --python /path/to/python{family.pythons[0]}"
    )


def _version(python: str) -> str | None:
    if python == sys.executable:
        return f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        answer = subprocess.run([python, "-c", VERSION], capture_output=True, text=True, timeout=QUICK_S, check=True)
    except (OSError, subprocess.SubprocessError):  # not installed, or a launcher of a version that is not
        return None
    return answer.stdout.strip()


def _run(
    command: Sequence[str], deadline: float, failure: str, progress: Progress, variables: dict[str, str] | None = None
) -> None:
    """Run it, with these environment variables, and report its lines. Raises RollartError with the last of them."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=variables
    )
    timer = threading.Timer(deadline, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode(errors="replace").strip()
            last.append(line)
            progress(line)
        code = process.wait()
        late = timer.finished.is_set()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    if late and code:
        raise RollartError(f"{failure}: it took more than {deadline:g} s")
    if code:
        raise RollartError("\n".join([f"{failure}:", *last]))


def _replace(folder: Path, new: Path | None) -> None:
    """Replace `folder`, which may not exist, by `new`."""
    old = folder.with_name(f".{folder.name}-removing")
    _remove(old)
    if folder.exists():
        folder.rename(old)
    if new is not None:
        new.rename(folder)
    _remove(old)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
