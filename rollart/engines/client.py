"""Client of an engine in another process, over one connection."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from rollart.core.errors import EngineFailed, EngineLost, ServiceError
from rollart.core.types import Completion, EngineStatus, GenerationRequest, LoadResult, Publication, TokenPart
from rollart.engines.contexts import Extended, SentContexts
from rollart.launch import rpc
from rollart.launch.rpc import Handler, Stream

T = TypeVar("T")
SHORT_S = 30.0
_part = msgspec.msgpack.Decoder(TokenPart)
_status = msgspec.msgpack.Decoder(EngineStatus)
FOREVER_S = 10 * 365 * 86_400.0  # for a call that its caller ends when nothing is streamed any more
LOAD_S = 3600.0  # a missing bucket ends a load much sooner


class StatusPush(msgspec.Struct, frozen=True, array_like=True):
    """A status after `first` seconds, and then one every `every` seconds."""

    first: float
    every: float


def push_handler(status: Callable[[], Awaitable[EngineStatus]]) -> Handler:
    """The engine's side of `EngineClient.push_status`."""

    async def statuses(push: StatusPush, stream: Stream) -> None:
        await asyncio.sleep(push.first)
        while True:
            stream(await status())
            await asyncio.sleep(push.every)

    return statuses


class EngineClient:
    """`deadline` is for one generation request; a request that misses it is cancelled at the engine too."""

    def __init__(self, client: rpc.RpcClient, *, deadline: float = 120.0) -> None:
        self._client = client
        self._deadline = deadline
        self._sent = SentContexts()

    @property
    def url(self) -> str:
        """Where other engines reach it, too."""
        return self._client.url

    @property
    def key(self) -> str | None:
        """What callers must show."""
        return self._client.key

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._call("generate", request, Completion, self._deadline)

    async def generate_in_parts(
        self, request: GenerationRequest, every: int, on_part: Callable[[TokenPart], bool]
    ) -> Completion:
        enough = False

        def on_item(item: msgspec.Raw) -> None:
            nonlocal enough
            if not enough and on_part(_part.decode(item)):
                enough = True
                self._client.send("abort", request.id)

        short = self._sent.shortened(request, every)
        completion = None
        if short.known:
            completion = (await self._call("extend", short, Extended, self._deadline, on_item)).completion
        if completion is None:
            whole = self._sent.whole(request, every)
            completion = await self._call("stream", whole, Completion, self._deadline, on_item)
        return replace(completion, finish="length") if enough and completion.finish == "abort" else completion

    async def prefill(self, request: GenerationRequest) -> int:
        return await self._call("prefill", request, int, self._deadline)

    async def abort(self, request_id: str) -> None:
        await self._call("abort", request_id, type(None), SHORT_S)

    async def load(self, publication: Publication) -> LoadResult:
        return await self._call("load", publication, LoadResult, LOAD_S)

    async def status(self) -> EngineStatus:
        return await self._call("status", None, EngineStatus, SHORT_S)

    async def push_status(self, push: StatusPush, on_status: Callable[[EngineStatus], None]) -> None:
        """The engine sends its status by itself. Never returns; raises EngineFailed. The caller has a deadline for each
        status."""
        on_item = lambda item: on_status(_status.decode(item))  # noqa: E731
        await self._call("statuses", push, type(None), FOREVER_S, on_item)

    async def close(self) -> None:
        await self._client.close()

    async def _call(
        self,
        method: str,
        argument: object,
        returns: type[T],
        deadline: float,
        on_item: Callable[[msgspec.Raw], None] = rpc.ignore_item,
    ) -> T:
        try:
            return await self._client.call(method, argument, returns=returns, deadline=deadline, on_item=on_item)
        except ServiceError as error:
            failure = EngineFailed if self._client.alive else EngineLost
            raise failure(str(error)) from error
