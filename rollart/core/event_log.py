"""Logs of JSON lines in zstd frames, in folders of numbered parts: the event log, and tapes of the control plane.
Nothing else knows this format.

Invariants: a frame holds whole lines and is appended with one write, so a kill loses at most the events of the last
`FLUSH_S` seconds and can tear only the last frame, which readers leave out and the next writer removes. Parts are only
appended to, and only the last one. Events are encoded when they are emitted; a thread compresses and writes them.
While the disk is full, events wait in memory, for at most `FULL_S` seconds; then the next one raises.
`zstdcat RUN_DIR/events/*` prints the lines.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from errno import EDQUOT, ENOSPC
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import msgspec
import zstandard

from rollart.core.events import AnyEvent, Event, Warned

E = TypeVar("E", bound=Event)

FULL_S = 600.0
FLUSH_S = 0.5  # also how late a watcher sees an event
FULL = "the event log could not be written: the disk is full"
_FRAME_LINES = 4096
_PART_BYTES = 16 << 20
_BLOCK = 1 << 16  # bytes read at once
_LEVEL = 7  # a fifth smaller than 1, for two microseconds more per event
_SUFFIX = ".jsonl.zst"
_DIGITS, _PER_SECOND = 5, 1e5  # of seconds: what is finer is noise, and half of the compressed log
_LONG = 1e9  # seconds


class LineLog:
    """Appends lines to the log in the folder `path`."""

    def __init__(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self._last_line = _repair(path)
        self._compress = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress
        self._lines: deque[bytes] = deque()
        self._writing, self._wake = threading.Lock(), threading.Event()
        self._error: OSError | None = None
        self._full_since: float | None = None
        self._full_reported = False
        self._closed = False
        self._path, self._number = path, _number(_parts(path)[-1]) if _parts(path) else 1
        self._file, self._size = _open(path, self._number)
        self._thread = threading.Thread(target=self._write_often, name=path.name, daemon=True)
        self._thread.start()

    def append(self, line: bytes) -> None:
        """Raises OSError if the disk cannot be written, or was full for too long."""
        if self._error is not None:
            raise self._error
        self._lines.append(line)
        if len(self._lines) == _FRAME_LINES:
            self._wake.set()

    def flush(self) -> None:
        """Returns when everything appended so far survives a kill. Raises OSError if the disk is full."""
        self._write_pending()
        if self._error is not None:
            raise self._error
        if self._lines and self._full_since is not None:
            raise OSError(ENOSPC, FULL)

    def close(self) -> None:
        """Raises OSError if the last events could not be written."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        self._thread.join()
        try:
            if self._error is None:
                self.flush()
        finally:
            os.close(self._file)

    def _write_often(self) -> None:
        while not self._closed and self._error is None:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            self._write_pending()

    def _write_pending(self) -> None:
        with self._writing:
            lines: list[bytes] = []
            try:
                while self._lines and self._error is None:
                    lines = [self._lines.popleft() for _ in range(min(len(self._lines), _FRAME_LINES))]
                    self._append(self._compress(b"\n".join([*lines, b""])))
                self._full_since, self._full_reported = None, False
            except OSError as error:
                self._lines.extendleft(reversed(lines))
                now = time.monotonic()
                self._full_since = self._full_since or now
                if error.errno not in (ENOSPC, EDQUOT) or now - self._full_since > FULL_S:
                    self._error = error

    def _append(self, frame: bytes) -> None:
        if self._size >= _PART_BYTES:
            old = self._file
            self._file, self._size = _open(self._path, self._number + 1)
            self._number += 1
            os.close(old)
        if os.write(self._file, frame) != len(frame):
            os.ftruncate(self._file, self._size)
            raise OSError(ENOSPC, FULL)
        self._size += len(frame)


class EventLog(LineLog):
    """Appends events to the log in the folder `path` and calls listeners."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        super().__init__(path)
        last = msgspec.json.decode(self._last_line, type=AnyEvent).t if self._last_line else 0.0
        self._clock, self._origin = clock, clock() - last
        self._encode = msgspec.json.Encoder().encode
        self._listeners: list[Callable[[AnyEvent], None]] = []

    def emit(self, event: AnyEvent) -> None:
        """Raises OSError as `append` does. A listener that fails is removed: a view never stops a run."""
        if self._full_since is not None and not self._full_reported and self._error is None:
            self._full_reported = True
            self.emit(Warned(message=f"the disk of {self._path.parent} is full; the run goes on for {FULL_S:g} s"))
        event.t = _rounded(self._clock() - self._origin)
        round_durations(event)
        self.append(self._encode(event))
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:
                self._listeners.remove(listener)
                self.emit(Warned(message=f"a view of the run failed and was closed: {error!r}"))

    def subscribe(self, listener: Callable[[AnyEvent], None]) -> None:
        self._listeners.append(listener)


def round_durations(event: AnyEvent) -> None:
    """As they are in the log."""
    for name in _durations(type(event)):
        if seconds := getattr(event, name):
            setattr(event, name, _rounded(seconds))


def _rounded(seconds: float) -> float:
    """As `round` to five digits, in half the time."""
    return int(seconds * _PER_SECOND + 0.5) / _PER_SECOND if 0.0 <= seconds < _LONG else round(seconds, _DIGITS)


@cache
def _durations(kind: type[Event]) -> tuple[str, ...]:
    """The fields of an event that are seconds."""
    fields = msgspec.structs.fields(kind)
    return tuple(field.name for field in fields if field.type is float and field.name.endswith(("seconds", "_s")))


class LogPosition(NamedTuple):
    """The end of the last whole frame that was read: the part, and the offset in it."""

    part: int = 1
    offset: int = 0


START = LogPosition()


class EventReader:
    """Reads a log while it grows: every `read` continues where the last one ended, one frame in memory at a time.

    With `kinds`, only those events are decoded. `position` is where the next `read` begins.
    """

    def __init__(self, path: Path, *kinds: type[Event], position: LogPosition = START) -> None:
        self._path, self.position = path, position
        self._decode = msgspec.json.Decoder(AnyEvent).decode
        self._starts = tuple(b'{"kind":"%b"' % kind.__name__.encode() for kind in kinds)

    def read(self) -> Iterator[AnyEvent]:
        """The events written since the last call; does not wait for more."""
        for line in self.lines():
            if not self._starts or line.startswith(self._starts):
                yield self._decode(line)

    def lines(self) -> Iterator[bytes]:
        for frame in self._frames():
            yield from frame.splitlines()

    def _frames(self) -> Iterator[bytes]:
        while (part := _part(self._path, self.position.part)).exists():
            over = _part(self._path, self.position.part + 1).exists()  # asked first: then nothing is added to this one
            for frame, end in _whole_frames(part, self.position.offset):
                self.position = LogPosition(self.position.part, end)
                yield frame
            if not over:
                return
            self.position = LogPosition(self.position.part + 1)


@overload
def read_events(path: Path) -> Iterator[AnyEvent]: ...


@overload
def read_events(path: Path, *kinds: type[E]) -> Iterator[E]: ...


def read_events(path: Path, *kinds: type[Event]) -> Iterator[Any]:
    """All events in order, or those of some kinds, without holding the log in memory."""
    return EventReader(path, *kinds).read()


def follow(path: Path, over: Callable[[], bool], *kinds: type[Event], poll_s: float = 0.2) -> Iterator[AnyEvent]:
    """The events as they are written; ends when `over` is true and all were read. Blocks its thread while it waits."""
    reader = EventReader(path, *kinds)
    while True:
        last = over()
        yield from reader.read()
        if last:
            return
        time.sleep(poll_s)


def log_bytes(path: Path) -> int:
    """Grows with every frame."""
    return sum(part.stat().st_size for part in _parts(path))


def exists(path: Path) -> bool:
    return _part(path, 1).is_file()


def _part(path: Path, number: int) -> Path:
    return path / f"{number:05d}{_SUFFIX}"


def _parts(path: Path) -> list[Path]:
    return sorted(path.glob("*" + _SUFFIX), key=_number)


def _number(part: Path) -> int:
    return int(part.name.removesuffix(_SUFFIX))


def _open(path: Path, number: int) -> tuple[int, int]:
    """The descriptor of a part to append to, and its size."""
    descriptor = os.open(_part(path, number), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return descriptor, os.fstat(descriptor).st_size


def _whole_frames(part: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Each frame from `offset` on, decompressed, and where it ends in the file. A torn last one is left out."""
    decompressor = zstandard.ZstdDecompressor()
    with open(part, "rb") as file:
        file.seek(offset)
        data, read, lines = b"", decompressor.decompressobj(), list[bytes]()
        while data := data or file.read(_BLOCK):
            try:
                lines.append(read.decompress(data))
            except zstandard.ZstdError:  # a power cut can leave zeros where the last frame should be
                return
            rest = read.unused_data if read.eof else b""
            offset, data = offset + len(data) - len(rest), rest
            if read.eof:
                yield b"".join(lines), offset
                read, lines = decompressor.decompressobj(), []


def _repair(path: Path) -> bytes:
    """Remove a torn last frame; returns the last line, if there is one."""
    for number, part in enumerate(reversed(_parts(path))):
        *_, (last, whole) = (b"", 0), *deque(_whole_frames(part, 0), maxlen=1)
        if number == 0:
            os.truncate(part, whole)
        if last:
            return last.splitlines()[-1]
    return b""
