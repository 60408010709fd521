"""The connection between the controller and a player: a Unix socket, and messages in both directions.

Invariants: messages arrive in the order in which they were sent; all of one turn of the event loop are one frame, its
length and then msgpack, with those before it that could wait. A connection that breaks is reported once.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import cast

import msgspec

LATER_S = 0.005  # a frame costs both sides more than a message does
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class Link(asyncio.Protocol):
    """`receive` gets each frame, a list of messages, still encoded. What is sent before there is a connection waits."""

    def __init__(self, receive: Callable[[bytes], None], on_lost: Callable[[str], object]) -> None:
        self._receive, self._on_lost = receive, on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._pending: list[object] = []
        self._soon = False
        self._later: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._lost = False
        self.received_at = 0.0  # the last frame

    def send(self, message: object) -> None:
        self._pending.append(message)
        if not self._soon and self._transport is not None:
            self._soon = True
            self._loop.call_soon(self._flush)

    def send_later(self, message: object) -> None:
        """With the next one that cannot wait, or within `LATER_S`."""
        self._pending.append(message)
        if not self._soon and self._later is None and self._transport is not None:
            self._later = self._loop.call_later(LATER_S, self._flush)

    def _flush(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._soon, self._later = False, None
        messages, self._pending = self._pending, []
        if messages and self._transport is not None and not self._lost:
            body = _encode(messages)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Sends nothing more."""
        self.connection_lost(None)
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.received_at = self._loop.time()
        if self._lost:
            self._transport.abort()  # closed before it was made
        elif self._pending:
            self._soon = True
            self._loop.call_soon(self._flush)

    def data_received(self, data: bytes) -> None:
        self.received_at = self._loop.time()
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            end = start + _LENGTH.size + _LENGTH.unpack_from(self._buffer, start)[0]
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[start + _LENGTH.size : end])
            start = end
            self._receive(body)
        del self._buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self._on_lost(f"the connection was lost: {error}" if error else "the connection was closed")
