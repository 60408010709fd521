"""What a forked process runs: it reads calls and replies. Standard library only, Python 3.9 or later.

A process reads `{"id", "call", "args"}` lines and replies to each, in order: `{"id", "value"}` or `{"id", "error"}`.
`{"id", "batch": [[slot, call, args], ...]}` is many calls at once, on an object for each slot; the value is a list of
`{"value"}` or `{"error"}`.

A request that comes while a call is under way interrupts it: `Interrupted` is raised in the foreign code, and there is
no reply to that call. The process goes on only if it has neither a thread nor a child left after the next request; an
import that was interrupted ends it. The caller's deadline is for code that never returns to Python, or goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rollart.workers.process_limits import ProcessLimits

HERE = Path(__file__).parent


class Interrupted(BaseException):
    """Nobody waits for the reply to this call any more."""


def describe(error: BaseException) -> str:
    """The exception, and where in the foreign code it was raised."""
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent != HERE]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return text[:2000] + where


def to_plain(value: Any) -> Any:
    """Numbers and arrays of numpy and similar libraries, for JSON."""
    for convert in ("tolist", "item"):
        if hasattr(value, convert):
            return getattr(value, convert)()
    raise TypeError(f"{type(value).__name__} is not a plain value")


READ_BYTES = 65536
JSON = json.JSONEncoder(default=to_plain, ensure_ascii=False, allow_nan=False)


def encode(message: dict[str, Any]) -> bytes:
    # Lone surrogates must not reach the other side: they would fail there, far from their cause.
    return JSON.encode(message).encode("utf-8", "replace") + b"\n"


def importing(frame: FrameType | None) -> bool:
    """Whether a module is only half there."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def runs_nothing_else() -> bool:
    """Whether this process has neither another thread nor a child, adopted ones included."""
    try:
        (thread,) = Path("/proc/self/task").iterdir()
        return not (thread / "children").read_text()
    except (OSError, ValueError):
        return False


class CallLoop:
    """`limit` is the size of a message in bytes."""

    def __init__(self, connection: socket.socket, target: Any, limit: int, limits: ProcessLimits) -> None:
        self._connection = connection
        self._target = target
        self._limit = limit
        self._limits = limits
        self._received = bytearray()
        self._in_call = False
        self._interrupted = False  # the last call
        fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())  # who gets SIGIO
        self._flags = fcntl.fcntl(connection, fcntl.F_GETFL)
        signal.signal(signal.SIGIO, self._interrupt)

    def run(self) -> NoReturn:
        handler = self._target()
        slots: dict[int, Any] = {}
        while True:
            request = json.loads(self._read_line())
            after_interruption = self._interrupted
            if "batch" in request:
                reply = self._replies(slots, request)
            else:
                reply = self._reply_unless_interrupted(handler, request)
            if after_interruption and not runs_nothing_else():
                os._exit(1)
            self._connection.sendall(reply)

    def _read_line(self) -> bytes:
        while b"\n" not in self._received:
            piece = self._connection.recv(READ_BYTES)
            if not piece or len(self._received) > self._limit:
                os._exit(1 if self._received else 0)
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return bytes(line)

    def _reply_unless_interrupted(self, handler: Any, request: dict[str, Any]) -> bytes:
        reply = b""
        try:
            self._interrupted, self._in_call = False, True
            fcntl.fcntl(self._connection, fcntl.F_SETFL, self._flags | os.O_ASYNC)
            self._interrupt(signal.SIGIO, None)  # by a request that came before
            reply = self._reply(handler, request["call"], request["args"], {"id": request["id"]})
            self._in_call = False
        except Interrupted:
            pass
        fcntl.fcntl(self._connection, fcntl.F_SETFL, self._flags)
        return b"" if self._interrupted else reply

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGIO, which room for the next reply sends, too."""
        if self._in_call and self._request_waits():
            self._in_call, self._interrupted = False, True
            if importing(frame):
                os._exit(1)
            raise Interrupted

    def _request_waits(self) -> bool:
        try:
            return bool(self._received or self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:  # there is none
            return False

    def _replies(self, slots: dict[int, Any], request: dict[str, Any]) -> bytes:
        replies = []
        for slot, call, args in request["batch"]:
            if slot not in slots:
                slots[slot] = self._target()
            replies.append(self._reply(slots[slot], call, args, {})[:-1])
        reply = b'{"id": %d, "value": [%b]}\n' % (request["id"], b", ".join(replies))
        if len(reply) > self._limit:
            text = f"a batch returned {len(reply):,} bytes; the limit is {self._limit:,}"
            return encode({"id": request["id"], "error": text})
        return reply

    def _reply(self, handler: Any, call: str, args: dict[str, Any], head: dict[str, int]) -> bytes:
        try:
            value = getattr(handler, call)(**args)
        except BaseException as error:  # even SystemExit: the caller waits for a reply
            classes = [each.__name__ for each in type(error).__mro__]
            return encode({**head, "error": describe(error) + self._limits.hint(error), "classes": classes})
        try:
            reply = encode({**head, "value": value})
        except Exception as error:
            return encode({**head, "error": f"`{call}` returned what JSON cannot carry: {describe(error)}"})
        if len(reply) > self._limit:
            text = f"`{call}` returned {len(reply):,} bytes; the limit is {self._limit:,}"
            return encode({**head, "error": text})
        return reply
