"""The event log: one JSON line per event, append-only. A kill can truncate only the last line."""

from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path
from typing import BinaryIO

import msgspec

from rollart.core.events import AnyEvent, Warned


class EventLog:
    """Appends to a file and calls listeners. Lines are written unbuffered, so a killed run keeps them."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._encoder = msgspec.json.Encoder()
        self._origin = clock() - _repair(path)
        self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115
        self._listeners: list[Callable[[AnyEvent], None]] = []

    def emit(self, event: AnyEvent) -> None:
        """Raises OSError when the disk is full. A listener that fails is removed: a view never stops a run."""
        event.t = round(self._clock() - self._origin, 6)
        line = self._encoder.encode(event) + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(ENOSPC, "the event log could not be written: the disk is full")
        for listener in list(self._listeners):
            try:
                listener(event)
            except Exception as error:
                self._listeners.remove(listener)
                self.emit(Warned(message=f"a view of the run failed and was closed: {error!r}"))

    def subscribe(self, listener: Callable[[AnyEvent], None]) -> None:
        self._listeners.append(listener)

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Leaves out a truncated last line."""
    decoder = msgspec.json.Decoder(AnyEvent)
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield decoder.decode(line)


def _repair(path: Path) -> float:
    """Remove a truncated last line; returns the time of the last event, or 0."""
    if not path.exists():
        return 0.0
    with open(path, "rb+") as file:
        whole, last = 0, b""
        for line in file:
            if line.endswith(b"\n"):
                whole, last = whole + len(line), line
        file.truncate(whole)
    return msgspec.json.decode(last, type=AnyEvent).t if last else 0.0
