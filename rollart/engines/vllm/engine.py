"""The engine protocol on top of one vLLM server.

Invariants:
- vLLM itself says which weights made each token; a version is told to it while generation is paused, after the swap.
- New weights are fetched, checked and found readable by vLLM's workers while generation goes on. Only then is it
  paused; requests in flight keep their place and go on with the new weights, their KV computed anew unless it is to be
  kept. If anything fails before the swap, generation goes on with the old weights; if the swap fails, nobody knows what
  the weights are, and `on_broken` is told.
- A request that its caller gives up, or that misses its deadline, is aborted at the server.
- From just before a swap until its end no KV is handed over, for it could be made by one version and used by another.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed, RollartError
from rollart.core.types import Completion, EngineStatus, GenerationRequest, LoadResult, Publication, Sampling
from rollart.engines.client import StreamRequest
from rollart.engines.vllm import tensor_map
from rollart.engines.vllm.api import VllmApi
from rollart.engines.vllm.kv_transfer import ASK, RECEIVE_S, KVOffer, KVOffers, KVPeers, PendingTransfers
from rollart.engines.vllm.response import CompletionBuilder
from rollart.weights.reader import WeightReader

_NAMED = "generate-tokens-"  # what vLLM puts before our names
_PAUSE_S = 60.0
_ALL = 1_000_000  # more tokens than an answer has: all of them at once
_Heard = Callable[[CompletionBuilder], Awaitable[None]]


class VllmEngine:
    """`token_bytes` is the KV of one token, for the shares that the router reckons with."""

    def __init__(
        self,
        api: VllmApi,
        config: EngineConfig,
        *,
        weights: WeightReader,
        version: int,
        token_bytes: int,
        peers: KVPeers,
        on_broken: Callable[[str], None],
    ) -> None:
        self.notes = KVOffers()
        self._api, self._config, self._weights, self._peers = api, config, weights, peers
        self._version, self._token_bytes, self._on_broken = version, token_bytes, on_broken
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        self._loading = asyncio.Lock()
        self._receiving = PendingTransfers()
        self._swapping = False
        self._swaps = 0
        self._busy_s = self._busy_since = 0.0

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._answered(request, _ALL, _nothing)

    async def stream(self, asked: StreamRequest, tell: Callable[[object], None]) -> Completion:
        """Tells of tokens as they are made."""

        async def news(answer: CompletionBuilder) -> None:
            if answer.fresh >= asked.every:
                tell(answer.taken())
                await asyncio.sleep(0)  # parts that have come already are read without a pause

        return await self._answered(asked.request, asked.every, news)

    async def _answered(self, request: GenerationRequest, every: int, heard: _Heard) -> Completion:
        with self._counted(request) as opened:
            body = _body(opened.name, request.tokens, request.sampling, every)
            if request.kv_from is None or self._swapping:
                return await self._complete(body, opened, heard)
            async with self._receiving_from(request.kv_from, request.id) as (params, arrived):
                more = {"kv_transfer_params": params} if params else {}

                async def came(answer: CompletionBuilder) -> None:
                    arrived()
                    await heard(answer)

                return await self._complete(body | more, opened, came)

    async def _complete(self, body: dict[str, Any], opened: "_Open", heard: _Heard) -> Completion:
        answer = CompletionBuilder(len(body["token_ids"]), handed="kv_transfer_params" in body)
        async with aclosing(self._api.stream(body)) as parts:
            async for part in parts:
                answer.add(part)
                await heard(answer)
                if opened.aborted:  # it may have come before vLLM knew the request
                    await self._api.abort([_NAMED + opened.name])
        return answer.completion()

    async def prefill(self, request: GenerationRequest) -> int:
        """vLLM then keeps its KV for another server."""
        if self._swapping:
            return 0
        note = None
        self.notes.begin(request.id, self._config.deadline)
        try:
            with self._counted(request) as opened:
                body = _body(opened.name, request.tokens, Sampling(temperature=0.0, max_tokens=1))
                answer = await self._api.generate(body | {"kv_transfer_params": ASK})
            if answer.kv_transfer_params:
                note = KVOffer(answer.kv_transfer_params, self._version)  # no swap while a prefill is under way
        finally:
            self.notes.keep(request.id, note)
        details = answer.usage.prompt_tokens_details if answer.usage is not None else None
        return len(request.tokens) - ((details.cached_tokens or 0) if details is not None else 0)

    @asynccontextmanager
    async def _receiving_from(
        self, url: str, request_id: str
    ) -> AsyncIterator[tuple[dict[str, Any] | None, Callable[[], None]]]:
        """How the KV of a request is to be had, and what to call when it is there."""
        self._receiving.add(request_id, RECEIVE_S)
        told: asyncio.Task[None] | None = None

        def arrived() -> None:
            nonlocal told
            self._receiving.remove(request_id)
            if told is None:
                told = asyncio.create_task(self._peers.received(url, request_id))

        try:
            yield await self._peers.note(url, request_id, self._version), arrived
        finally:
            arrived()
            if told is not None:
                await told

    async def abort(self, request_id: str) -> None:
        opened = self._open.get(request_id)
        if opened is not None:
            opened.aborted = True
            await self._api.abort([_NAMED + opened.name])

    async def status(self) -> EngineStatus:
        told = await self._api.metrics()
        budget = told.kv_tokens * self._token_bytes or self._config.kv_megabytes << 20
        used = int(told.kv_use * budget)
        reserved = sum(opened.tokens for opened in self._open.values()) * self._token_bytes
        return EngineStatus(
            version=self._version,
            running=told.running,
            waiting=max(told.waiting, len(self._open) - told.running),  # vLLM does not count those that wait in a pause
            kv_bytes=used,
            kv_budget=budget,
            prefilled=told.prefilled,
            generated=told.generated,
            swaps=self._swaps,
            busy_s=self._busy_s + (time.perf_counter() - self._busy_since if self._open else 0.0),
            kv_reserved=max(used, reserved),
        )

    # Weights

    async def adopt(self, folder: tensor_map.TensorMap | None) -> None:
        """Make the server's weights those of `folder`, if it has others, and tell it their version."""
        async with self._loading:
            if folder is not None:
                await self._prepare(self._version, folder)
                await self._swap(self._version)
            else:
                await self._api.post("/update_weight_version", {"new_version": str(self._version)})

    async def load(self, publication: Publication) -> LoadResult:
        version = publication.version
        async with self._loading:
            began = time.perf_counter()
            try:
                held = await asyncio.to_thread(self._weights.fetch, publication)
            except RollartError as error:
                raise EngineFailed(f"version {version} was not loaded: {error}") from error
            try:
                path = self._weights.store.path
                files = [
                    (path(version, publication.id, shard.manifest.shard, "data"), shard.manifest)
                    for shard in held.shards
                ]
                await self._prepare(version, tensor_map.in_shards(files))
                transfer_s = time.perf_counter() - began
                exposed_s = await self._swap(version)
            finally:
                held.release()
            return LoadResult(version, transfer_s, exposed_s, held.bytes, held.transport)

    async def _prepare(self, version: int, where: tensor_map.TensorMap) -> None:
        try:
            await self._api.workers("rollart_prepare", **where.arguments())
        except EngineFailed as error:
            raise EngineFailed(
                f"version {version} was not loaded: vLLM's workers could not take it from {where.files[0]}: {error}; a "
                "server that someone else runs needs our extension, and must see this folder: run it on this machine, "
                "or name a folder that both see as `weights` in the run file"
            ) from error

    async def _swap(self, version: int) -> float:
        """Answers how long generation was held up."""
        self._swapping = True
        try:
            await asyncio.gather(self.notes.drained(), self._receiving.over())
            async with self._paused() as began:
                try:
                    await self._api.workers("rollart_swap")
                    await self._api.post("/update_weight_version", {"new_version": str(version)})
                except BaseException as error:
                    self._on_broken(f"the swap to version {version} failed half-way: {error or type(error).__name__}")
                    raise
                self._version = version
        finally:
            self._swapping = False
        self._swaps += 1
        return time.perf_counter() - began

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[float]:
        clear = "false" if self._config.on_swap == "keep" else "true"
        mode = "wait" if self._config.on_swap == "drain" else "keep"
        deadline = self._config.deadline if mode == "wait" else _PAUSE_S
        began = time.perf_counter()
        try:
            await self._api.post(f"/pause?mode={mode}&clear_cache={clear}", deadline=deadline)
            yield began
        finally:
            await self._api.post("/resume")

    @contextmanager
    def _counted(self, request: GenerationRequest) -> "Iterator[_Open]":
        if request.id in self._open:
            raise EngineFailed(f"request {request.id!r} is already in flight; give each request an id of its own")
        if not self._open:
            self._busy_since = time.perf_counter()
        opened = _Open(f"{request.id}-{next(self._numbers)}", len(request.tokens) + request.sampling.max_tokens)
        self._open[request.id] = opened
        try:
            yield opened
        finally:
            del self._open[request.id]
            if not self._open:
                self._busy_s += time.perf_counter() - self._busy_since


class _Open:
    """A request at the server: what it is called there, and the tokens that it may come to hold."""

    __slots__ = ("aborted", "name", "tokens")

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens, self.aborted = name, tokens, False


async def _nothing(answer: CompletionBuilder) -> None:
    """For an answer of which nobody hears before it is complete."""


def _body(name: str, tokens: list[int], sampling: Sampling, every: int = _ALL) -> dict[str, Any]:
    """The first token is told when it is there, the others `every` so many."""
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop,
        "ignore_eos": True,  # what ends an answer is the caller's to say
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": every,
    }
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return {"request_id": name, "token_ids": tokens, "sampling_params": params}
