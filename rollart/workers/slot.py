"""One process of a host, as the controller sees it.

The invariants:
- A slot has at most one call under way. A call that misses its deadline, is cancelled, or gets an answer that breaks
  the protocol ends its slot, so an answer can only ever belong to the call that waits for it.
- A slot that is lost stays lost; closing its connection makes the host kill the process group behind it.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from rollart.core.errors import RollartError

HOST_LOST = "the process ended, and its host with it"


class SlotLost(RollartError):
    """The process hung, ended or broke the protocol. It is gone, with its state."""


class CallRaised(RollartError):
    """The called code raised, or answered what cannot be sent. The process lives."""


class Slot(asyncio.Protocol):
    """One process, spoken to over its own connection."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._serial = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._transport: asyncio.Transport | None = None
        self.started: asyncio.Future[int] = self._loop.create_future()
        self.ended: asyncio.Future[str] = self._loop.create_future()  # why it is lost
        self.lost = ""

    @property
    def used(self) -> bool:
        """Whether anything was ever asked of it."""
        return self._serial > 0

    async def call(self, name: str, args: Mapping[str, object], deadline: float) -> Any:
        """Raises SlotLost or CallRaised."""
        if self.lost or self._transport is None:
            raise SlotLost(self.lost or "the process has not started")
        if self._answer is not None:
            raise RuntimeError("a slot takes one call at a time")
        self._serial += 1
        frame = msgspec.json.encode({"id": self._serial, "call": name, "args": args}) + b"\n"
        if len(frame) > self._limit:
            raise CallRaised(f"`{name}` was given {len(frame):,} bytes, more than the limit of {self._limit:,}")
        self._answer = self._loop.create_future()
        self._transport.write(frame)
        try:
            async with asyncio.timeout(deadline):
                answer = await self._answer
        except TimeoutError:
            self.kill(f"`{name}` did not answer within {deadline:g} s; the process was killed")
            raise SlotLost(self.lost) from None
        except asyncio.CancelledError:
            self.kill(f"`{name}` was cancelled; the process was killed")
            raise
        finally:
            self._answer = None
        if "error" in answer:
            raise CallRaised(str(answer["error"]))
        return answer["value"]

    def kill(self, reason: str) -> None:
        """End the process group. The first reason stays."""
        self.lost = self.lost or reason
        if not self.ended.done():
            self.ended.set_result(self.lost)
        if self._transport is not None:
            self._transport.abort()
        for waiting in (self._answer, self.started):
            if waiting is not None and not waiting.done():
                waiting.set_exception(SlotLost(self.lost))
                waiting.exception()  # seen, even if nobody waits any more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if b"\n" in data:
            *lines, rest = self._buffer.split(b"\n")
            self._buffer = rest
            for line in lines:
                if line and not self.lost:
                    self._received(line)
        if len(self._buffer) > self._limit:
            self.kill(f"the process answered more than {self._limit:,} bytes and was killed")

    def _received(self, line: bytes | bytearray) -> None:
        try:
            message = msgspec.json.decode(line, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            self.kill(f"the process answered what is not one JSON object ({error}) and was killed")
            return
        if "ended" in message:
            self.kill(f"the process {message['ended']}")
        elif "pid" in message and not self.started.done():
            self.started.set_result(message["pid"])
        elif self._answer is None or self._answer.done() or message.get("id") != self._serial:
            self.kill("the process answered what was not asked and was killed")
        elif "value" in message or "error" in message:
            self._answer.set_result(message)
        else:
            self.kill("the process answered neither a value nor an error and was killed")

    def connection_lost(self, error: Exception | None) -> None:
        self.kill(HOST_LOST)
