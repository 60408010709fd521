"""Connections to a host that have not shown its key yet. Standard library only, Python 3.9 or later.

The invariants: a connection costs a descriptor and a few bytes until it has shown the key, for at most `KEY_S`; at most
`MAX_CALLERS` are that far, and the oldest of them makes room; not a byte after the key is read.
"""

from __future__ import annotations

import hmac
import select
import socket
import time
from dataclasses import dataclass

KEY_S, MAX_CALLERS = 10.0, 64


@dataclass
class Caller:
    connection: socket.socket
    deadline: float
    shown: bytes = b""


class Callers:
    """Registers its connections in the host's `poll`."""

    def __init__(self, key: str, poll: select.poll) -> None:
        self._key = key.encode() + b"\n"
        self._poll = poll
        self._waiting: dict[int, Caller] = {}  # by file descriptor, the oldest first

    @property
    def descriptors(self) -> set[int]:
        return set(self._waiting)

    @property
    def connections(self) -> list[socket.socket]:
        return [caller.connection for caller in self._waiting.values()]

    @property
    def deadline(self) -> float:
        """Of the oldest, in the time of `time.monotonic`."""
        return next((caller.deadline for caller in self._waiting.values()), float("inf"))

    def add(self, connection: socket.socket) -> None:
        while len(self._waiting) >= MAX_CALLERS:
            self._drop(next(iter(self._waiting)))
        self._waiting[connection.fileno()] = Caller(connection, time.monotonic() + KEY_S)
        self._poll.register(connection.fileno(), select.POLLIN)

    def read(self, descriptor: int) -> socket.socket | None:
        """The connection, once it has shown the key."""
        caller = self._waiting[descriptor]
        try:
            piece = caller.connection.recv(len(self._key) - len(caller.shown), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except OSError:
            piece = b""
        caller.shown += piece
        if piece and len(caller.shown) < len(self._key) and b"\n" not in piece:
            return None
        if not hmac.compare_digest(caller.shown, self._key):
            self._drop(descriptor)
            return None
        self._poll.unregister(descriptor)
        return self._waiting.pop(descriptor).connection

    def expire(self) -> None:
        now = time.monotonic()
        for descriptor in [each for each, caller in self._waiting.items() if caller.deadline <= now]:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._waiting.pop(descriptor).connection.close()
