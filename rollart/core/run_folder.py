"""The folder of a run: `<output>/<name>-<n>`, and the lock that its controller holds for as long as it lives.

The kernel frees the lock with the process, however that ends, and a process that ends by itself empties its file: one
that is free and not empty is that of a controller that was killed.
"""

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from rollart.core import event_log
from rollart.core.errors import RollartError

_LOCK = ".lock"
_LOCK_S, _LOCK_POLL_S = 1.0, 0.02


def create(output: Path, name: str) -> Path:
    """A new folder with the next free number; two runs started at once get two folders."""
    output.mkdir(parents=True, exist_ok=True)
    number = max(numbered(output, name), default=0)
    while True:
        number += 1
        folder = output / f"{name}-{number}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def newest(output: Path, name: str) -> Path:
    number = max(numbered(output, name), default=None)
    if number is None:
        raise RollartError(f"{output} holds no run of {name!r} to resume; leave out --resume to start one")
    return output / f"{name}-{number}"


def numbered(output: Path, name: str) -> Iterator[int]:
    if output.is_dir():
        for folder in output.iterdir():
            match = re.fullmatch(re.escape(name) + r"-(\d+)", folder.name)
            if match and folder.is_dir():
                yield int(match[1])


def events_of(folder: Path) -> Path:
    """The event log of a run folder."""
    path = folder / "events"
    if not event_log.exists(path):
        raise RollartError(f"{folder} is not a run folder: it has no event log")
    return path


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time works in a folder. Raises RollartError if another one does."""
    deadline = time.monotonic() + _LOCK_S
    with open(folder / _LOCK, "a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:  # longer than `has_controller` holds it
                    raise RollartError(f"another process is already training in {folder}") from None
            time.sleep(_LOCK_POLL_S)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            lock.truncate(0)


def has_controller(folder: Path) -> bool | None:
    """Whether a process works in it. None: unknown, because whatever wrote the folder takes no lock."""
    try:
        with open(folder / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none, or it cannot be read
        return None
    return False


def was_killed(folder: Path) -> bool:
    """Whether its last controller ended without a word."""
    return has_controller(folder) is False and (folder / _LOCK).stat().st_size > 0
