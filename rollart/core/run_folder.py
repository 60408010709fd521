"""The folder of a run: `<output>/<name>-<n>`."""

import re
from collections.abc import Iterator
from pathlib import Path

from rollart.core import event_log
from rollart.core.errors import RollartError


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
