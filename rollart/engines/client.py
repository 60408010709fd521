"""Client of an engine in another process, over one connection."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from rollart.core.errors import EngineFailed, EngineLost, ServiceError
from rollart.core.types import Completion, EngineStatus, GenerationRequest, LoadResult, Publication, TokenPart
from rollart.engines.contexts import Extended, SentContexts
from rollart.launch import rpc

T = TypeVar("T")
SHORT_S = 30.0
_part = msgspec.msgpack.Decoder(TokenPart)
LOAD_S = 3600.0  # a missing bucket ends a load much sooner


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
