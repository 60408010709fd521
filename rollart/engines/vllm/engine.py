"""The engine protocol on top of one vLLM server.

Invariants:
- vLLM itself labels each token with the version of the weights; the label changes after the swap, during the pause.
- New weights are fetched, checked and mapped by vLLM's workers while generation goes on. Only then is it paused;
  requests in flight go on with the new weights, their KV recomputed unless `on_swap` is keep. If anything fails before
  the swap, generation goes on with the old weights; if the swap fails, the weights are unknown, and `on_broken` is
  called.
- A request that is cancelled or misses its deadline is aborted at the server.
- From just before a swap until its end no KV is transferred: one version could compute it and another use it.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any

from rollart.config import EngineConfig
from rollart.core.errors import EngineFailed, RollartError
from rollart.core.types import Completion, EngineStatus, GenerationRequest, LoadResult, Publication, Sampling
from rollart.engines.contexts import StreamRequest
from rollart.engines.vllm import tensor_map
from rollart.engines.vllm.api import VllmApi
from rollart.engines.vllm.command import ADAPTER
from rollart.engines.vllm.kv_transfer import ASK, RECEIVE_S, KVOffer, KVOffers, KVPeers, PendingTransfers
from rollart.engines.vllm.response import CompletionBuilder
from rollart.weights.reader import WeightReader

_PREFIX = "generate-tokens-"  # that vLLM adds to our request ids
_PAUSE_S = 60.0
_SEED_STRIDE = 0x9E3779B1
_WHOLE = 1_000_000  # more tokens than a response has: all at once
_OnChunk = Callable[[CompletionBuilder], Awaitable[None]]


class VllmEngine:
    """`token_bytes` is the KV of one token, for the status that the router uses. `experts` is their number in a mixture
    whose choices the server returns, else 0. `lora`, that section of the run file: what is published are adapters."""

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
        experts: int = 0,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        self.offers = KVOffers()
        self._api, self._config, self._weights, self._peers = api, config, weights, peers
        self._version, self._token_bytes, self._on_broken = version, token_bytes, on_broken
        self._experts, self._lora = experts, lora
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        self._loading = asyncio.Lock()
        self._receiving = PendingTransfers()
        self._swapping = False
        self._swaps = 0
        self._busy_s = self._busy_since = 0.0

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._run(request, _WHOLE, _ignore)

    async def stream(self, streamed: StreamRequest, on_part: Callable[[object], None]) -> Completion:
        """Calls `on_part` with new tokens as they are generated."""
        version = self._version

        async def on_chunk(builder: CompletionBuilder) -> None:
            nonlocal version
            if builder.fresh >= streamed.every or (builder.fresh and not builder.taken):
                on_part(builder.take(version))
                version = self._version  # of what comes next, at least
                await asyncio.sleep(0)  # chunks that have arrived are read without a pause

        return await self._run(streamed.request, streamed.every, on_chunk)

    async def _run(self, request: GenerationRequest, every: int, on_chunk: _OnChunk) -> Completion:
        with self._counted(request) as opened:
            body = self._body(opened.name, request.tokens, request.sampling, every, resumed=request.resumed)
            if self._experts:
                body["sampling_params"]["routed_experts_prompt_start"] = request.experts_known
            if request.kv_from is None or self._swapping:
                return await self._complete(body, opened, on_chunk)
            async with self._receiving_from(request.kv_from, request.id) as (params, arrived):
                more = {"kv_transfer_params": params} if params else {}

                async def on_first_chunk(builder: CompletionBuilder) -> None:
                    arrived()
                    await on_chunk(builder)

                return await self._complete(body | more, opened, on_first_chunk)

    async def _complete(self, body: dict[str, Any], opened: "_Open", on_chunk: _OnChunk) -> Completion:
        builder = CompletionBuilder(
            len(body["token_ids"]),
            fetched="kv_transfer_params" in body,
            experts=self._experts,
            experts_known=body["sampling_params"].get("routed_experts_prompt_start", 0),
        )
        async with aclosing(self._api.stream(body)) as chunks:
            async for chunk in chunks:
                builder.add(chunk)
                await on_chunk(builder)
                if opened.aborted:  # perhaps before vLLM knew the request
                    await self._api.abort([_PREFIX + opened.name])
        return builder.completion()

    def _body(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _body(*args, **kwargs) | ({"model": ADAPTER} if self._lora else {})

    async def prefill(self, request: GenerationRequest) -> int:
        """Computes its KV, which vLLM then keeps for another server."""
        if self._swapping:
            return 0
        offer = None
        self.offers.begin(request.id, self._config.deadline)
        try:
            with self._counted(request) as opened:
                body = self._body(opened.name, request.tokens, Sampling(temperature=0.0, max_tokens=1))
                response = await self._api.generate(body | {"kv_transfer_params": ASK})
            if response.kv_transfer_params:
                offer = KVOffer(response.kv_transfer_params, self._version)  # no swap during a prefill
        finally:
            self.offers.keep(request.id, offer)
        details = response.usage.prompt_tokens_details if response.usage is not None else None
        return len(request.tokens) - ((details.cached_tokens or 0) if details is not None else 0)

    @asynccontextmanager
    async def _receiving_from(
        self, url: str, request_id: str
    ) -> AsyncIterator[tuple[dict[str, Any] | None, Callable[[], None]]]:
        """Parameters to fetch the KV of a request, and what to call when it has arrived."""
        self._receiving.add(request_id, RECEIVE_S)
        report: asyncio.Task[None] | None = None

        def arrived() -> None:
            nonlocal report
            self._receiving.remove(request_id)
            if report is None:
                report = asyncio.create_task(self._peers.received(url, request_id))

        try:
            yield await self._peers.take(url, request_id, self._version), arrived
        finally:
            arrived()
            if report is not None:
                await report

    async def abort(self, request_id: str) -> None:
        opened = self._open.get(request_id)
        if opened is not None:
            opened.aborted = True
            await self._api.abort([_PREFIX + opened.name])

    async def status(self) -> EngineStatus:
        metrics = await self._api.metrics()
        budget = metrics.kv_tokens * self._token_bytes or self._config.kv_megabytes << 20
        used = int(metrics.kv_use * budget)
        reserved = sum(opened.tokens for opened in self._open.values()) * self._token_bytes
        return EngineStatus(
            version=self._version,
            running=metrics.running,
            waiting=max(metrics.waiting, len(self._open) - metrics.running),  # vLLM does not count those in a pause
            kv_bytes=used,
            kv_budget=budget,
            prefilled=metrics.prefilled,
            generated=metrics.generated,
            swaps=self._swaps,
            busy_s=self._busy_s + (time.perf_counter() - self._busy_since if self._open else 0.0),
            kv_reserved=max(used, reserved),
        )

    # Weights

    async def adopt(self, folder: tensor_map.TensorMap | None) -> None:
        """Sets the label of the server's version, after loading `folder` if given."""
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
            return LoadResult(
                version, transfer_s, exposed_s, held.bytes, held.transport, hops=held.hops, relay=held.relay
            )

    async def _prepare(self, version: int, where: tensor_map.TensorMap) -> None:
        try:
            lora = {"lora": {key: self._lora[key] for key in ("rank", "alpha")}} if self._lora else {}
            await self._api.workers("rollart_prepare", **where.arguments(), **lora)
        except EngineFailed as error:
            raise EngineFailed(
                f"version {version} was not loaded: vLLM's workers could not load it from {where.files[0]}: {error}; a "
                "server that someone else runs needs our extension, and must see this folder: run it on this machine, "
                "or name a folder that both see as `weights` in the run file"
            ) from error

    async def _swap(self, version: int) -> float:
        """Returns how long generation was paused."""
        self._swapping = True
        try:
            await asyncio.gather(self.offers.drained(), self._receiving.over())
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
    """A request at the server: its id there, and the tokens that it may grow to."""

    __slots__ = ("aborted", "name", "tokens")

    def __init__(self, name: str, tokens: int) -> None:
        self.name, self.tokens, self.aborted = name, tokens, False


async def _ignore(builder: CompletionBuilder) -> None:
    """For a response that is not streamed."""


def _body(name: str, tokens: list[int], sampling: Sampling, every: int = _WHOLE, *, resumed: int = 0) -> dict[str, Any]:
    """Streams the first token at once, the others in groups of `every`. `resumed`: see GenerationRequest."""
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop,
        "ignore_eos": True,  # the caller gives the stop tokens
        "logprobs": 0,
        "detokenize": False,
        "stream_interval": every,
    }
    if sampling.seed is not None:
        # vLLM's stream of random numbers cannot start in the middle: the rest of an answer has one of its own.
        params["seed"] = (sampling.seed + _SEED_STRIDE * resumed) % 2**31
    return {"request_id": name, "token_ids": tokens, "sampling_params": params}
