"""What a forked process runs: it reads calls and replies. Standard library only, Python 3.9 or later.

A process reads `{"id", "call", "args"}` lines and replies to each, in order: `{"id", "value"}` or `{"id", "error"}`.
`{"id", "batch": [[slot, call, args], ...]}` is many calls at once, on an object for each slot; the value is a list of
`{"value"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import os
import socket
import traceback
from pathlib import Path
from typing import Any, NoReturn

from rollart.workers.process_limits import ProcessLimits

HERE = Path(__file__).parent


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


JSON = json.JSONEncoder(default=to_plain, ensure_ascii=False, allow_nan=False)


def encode(message: dict[str, Any]) -> bytes:
    # Lone surrogates must not reach the other side: they would fail there, far from their cause.
    return JSON.encode(message).encode("utf-8", "replace") + b"\n"


class CallLoop:
    """`limit` is the size of a message in bytes."""

    def __init__(self, connection: socket.socket, target: Any, limit: int, limits: ProcessLimits) -> None:
        self._connection = connection
        self._target = target
        self._limit = limit
        self._limits = limits

    def run(self) -> NoReturn:
        requests = self._connection.makefile("rb")
        handler = self._target()
        slots: dict[int, Any] = {}
        while True:
            line = requests.readline(self._limit + 1)
            if not line.endswith(b"\n"):
                os._exit(0 if not line else 1)
            request = json.loads(line)
            if "batch" in request:
                self._connection.sendall(self._replies(slots, request))
            else:
                self._connection.sendall(self._reply(handler, request["call"], request["args"], {"id": request["id"]}))

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
