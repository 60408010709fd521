"""One forked process of a host, as the controller sees it.

The invariants:
- A process has at most one call, or one batch of calls, under way. One that misses its deadline, is cancelled, or gets
  a reply that breaks the protocol ends its process, so a reply can only belong to the call that waits for it.
- A call may name another one that interrupts it when it is cancelled. Nothing else is called before that one has
  returned; unless it does so within `INTERRUPT_S`, the process ends all the same.
- A lost process stays lost; closing its connection makes the host kill the process group behind it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from rollart.core.errors import RollartError
from rollart.core.foreign import is_bug
from rollart.launch.keepalive import enable_keepalive

BatchedCall = tuple[int, str, Mapping[str, object]]  # the slot, the name, the arguments
HOST_LOST = "the process ended, and its host with it"
INTERRUPT_S = 0.5  # a new process costs far less
_replies = msgspec.json.Decoder(dict[str, Any])  # made once: ten times as fast as `decode` with a type


class ProcessLost(RollartError):
    """The process hung, ended or broke the protocol. It is gone, with its state."""


class CallRaised(RollartError):
    """The called code raised, or returned what cannot be sent. The process lives. `bug`: it would raise again."""

    def __init__(self, reason: str, bug: bool = False) -> None:
        super().__init__(reason)
        self.bug = bug


class WorkerProcess(asyncio.Protocol):
    """The protocol of the connection to one process. `limit` is the size of a message in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._calls = 0
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._interruption: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None
        self.started: asyncio.Future[int] = self._loop.create_future()  # its pid
        self.ended: asyncio.Future[str] = self._loop.create_future()  # the reason
        self.lost = ""  # the reason

    @property
    def used(self) -> bool:
        """Whether it was ever called."""
        return self._calls > 0

    @property
    def interrupted(self) -> bool:
        """Whether its last call was cancelled and has not ended yet."""
        return self._interruption is not None

    async def settled(self) -> bool:
        """Wait until it is not `interrupted` any more; whether it can be called."""
        if self._interruption is not None:
            await asyncio.wait([self._interruption])
        return not self.lost

    async def connect(self, address: str | tuple[str, int], key: str) -> None:
        """To a host at a Unix socket or a port, which wants the key; the host forks. Raises OSError or ProcessLost."""
        if isinstance(address, str):
            await self._loop.create_unix_connection(lambda: self, address)
        else:
            transport, _ = await self._loop.create_connection(lambda: self, *address)
            enable_keepalive(transport.get_extra_info("socket"))
            transport.write(key.encode() + b"\n")
        await self.started

    async def call(self, name: str, args: Mapping[str, object], deadline: float, interrupt_by: str = "") -> Any:
        """`interrupt_by` is called when this is cancelled; without it the process is killed. Raises ProcessLost or
        CallRaised."""
        return await self._call(name, {"call": name, "args": args}, deadline, interrupt_by)

    async def call_all(self, calls: Sequence[BatchedCall], deadline: float) -> list[dict[str, Any]]:
        """Many calls, one after the other: the `value` or the `error` of each. Raises ProcessLost or CallRaised."""
        replies = await self._call("batch", {"batch": calls}, deadline)
        if not isinstance(replies, list) or len(replies) != len(calls):
            self.kill("the process did not reply to every call of a batch and was killed")
            raise ProcessLost(self.lost)
        return replies

    async def _call(self, name: str, request: dict[str, object], deadline: float, interrupt_by: str = "") -> Any:
        if self.lost or self._transport is None:
            raise ProcessLost(self.lost or "the process has not started")
        if self._reply is not None or self._interruption is not None:
            raise RuntimeError("a process takes one call at a time")
        self._calls += 1
        frame = msgspec.json.encode({"id": self._calls, **request}) + b"\n"
        if len(frame) > self._limit:
            raise CallRaised(f"the arguments of `{name}` have {len(frame):,} bytes; the limit is {self._limit:,}")
        self._reply = self._loop.create_future()
        self._transport.write(frame)
        late = f"`{name}` did not return within {deadline:g} s; the process was killed"
        timer = self._loop.call_later(deadline, self.kill, late)  # costs less than half of `asyncio.timeout`
        try:
            reply = await self._reply
        except asyncio.CancelledError:
            if interrupt_by and not self.lost:
                self._interrupt(name, interrupt_by)
            else:
                self.kill(f"`{name}` was cancelled; the process was killed")
            raise
        finally:
            timer.cancel()
            self._reply = None
        if "error" in reply:
            raise CallRaised(str(reply["error"]), bug=is_bug(reply.get("classes")))
        return reply["value"]

    def _interrupt(self, name: str, by: str) -> None:
        """A request that comes during a call interrupts it."""
        assert self._transport is not None
        self._calls += 1
        self._transport.write(msgspec.json.encode({"id": self._calls, "call": by, "args": {}}) + b"\n")
        self._interruption = self._loop.create_future()
        late = f"`{name}` was cancelled and did not end within {INTERRUPT_S:g} s; the process was killed"
        timer = self._loop.call_later(INTERRUPT_S, self.kill, late)
        self._interruption.add_done_callback(lambda _: timer.cancel())

    def _interruption_ended(self) -> None:
        if self._interruption is not None:
            self._interruption.set_result(None)
            self._interruption = None

    def kill(self, reason: str) -> None:
        """End the process group. The first reason stays."""
        self.lost = self.lost or reason
        if not self.ended.done():
            self.ended.set_result(self.lost)
        if self._transport is not None:
            self._transport.abort()
        self._interruption_ended()
        for waiting in (self._reply, self.started):
            if waiting is not None and not waiting.done():
                waiting.set_exception(ProcessLost(self.lost))
                waiting.exception()  # marks it retrieved, even if nobody waits any more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # one of uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if b"\n" in data:
            *lines, rest = self._buffer.split(b"\n")
            self._buffer = rest
            for line in lines:
                if line and not self.lost:
                    self._received(line)
        if len(self._buffer) > self._limit:
            self.kill(f"the process sent more than {self._limit:,} bytes and was killed")

    def _received(self, line: bytes | bytearray) -> None:
        try:
            message = _replies.decode(line)
        except (ValueError, RecursionError) as error:
            self.kill(f"the process sent what is not one JSON object ({error}) and was killed")
            return
        if "ended" in message:
            self.kill(f"the process {message['ended']}")
        elif "pid" in message and not self.started.done():
            self.started.set_result(message["pid"])
        elif self._interruption is not None:
            self._received_while_interrupted(message)
        elif self._reply is None or message.get("id") != self._calls:
            self.kill("the process sent a reply to no call and was killed")
        elif self._reply.cancelled():
            pass  # its caller is about to run, and will interrupt or kill what has just ended
        elif self._reply.done():
            self.kill("the process sent a reply to no call and was killed")
        elif "value" in message or "error" in message:
            self._reply.set_result(message)
        else:
            self.kill("the process sent neither a value nor an error and was killed")

    def _received_while_interrupted(self, message: dict[str, Any]) -> None:
        if message.get("id") == self._calls and "value" in message:
            self._interruption_ended()
        elif message.get("id") != self._calls - 1:  # of the cancelled call, which had returned already
            self.kill(f"the process was interrupted and killed: {message.get('error', 'it sent a reply to no call')}")

    def connection_lost(self, error: Exception | None) -> None:
        self.kill(HOST_LOST)
