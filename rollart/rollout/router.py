"""Sends each request to an engine, and to another one if that fails.

Invariants: a request goes only to an engine that is alive, is not draining and has at least version `floor`; if there
is none it waits, with a deadline. A request is tried at most `attempts` times. Cancelling `generate` aborts the request
at the engine. What a request adds to an engine's load is taken off again, once, however it ends.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from msgspec import Struct

from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.protocols import StreamingEngine, TokenStream
from rollart.core.run_length import fingerprint
from rollart.core.types import Completion, GenerationRequest, Publication
from rollart.rollout.decode_lengths import DecodeLengths
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EngineState
from rollart.rollout.routing_policy import MeasuredPolicy, RoutingChoice, RoutingPolicy, RoutingQuery, Why

_WAIT_S = 120.0
_FIRST_PROMPTS = 4096


class Routed(Struct):
    """A completion, the engine and pool that made it, why they were chosen, and the predicted seconds."""

    completion: Completion
    engine: str
    pool: str
    why: Why
    predicted_s: float
    prefilled_by: str = ""


class _CachedAt(Struct):
    """Where a conversation's KV is: `tokens` of it, made by `version`."""

    engine: EngineState
    tokens: int
    version: int


class Router:
    """`affinity` is what the run file declares for each task. `keeps_kv`: KV survives a weight swap. `max_wait`:
    seconds that a request waits for a usable engine."""

    def __init__(
        self,
        engines: EngineRegistry,
        *,
        policy: RoutingPolicy | None = None,
        affinity: Mapping[str, str | tuple[str, ...]] | None = None,
        decode_lengths: DecodeLengths | None = None,
        attempts: int = 3,
        keeps_kv: bool = False,
        max_wait: float = _WAIT_S,
    ) -> None:
        self.engines = engines
        self._decode_lengths = decode_lengths or DecodeLengths()
        self._policy = policy or MeasuredPolicy()
        self._affinity = dict(affinity or {})
        self._sessions: dict[str, _CachedAt] = {}
        self._first_prompts: OrderedDict[int, _CachedAt] = OrderedDict()  # a plain dict is slow to lose its first key
        self._attempts, self._keeps_kv, self._max_wait = attempts, keeps_kv, max_wait

    async def load(self, publication: Publication) -> None:
        """Bring every engine to a published version, each as soon as it can."""
        await self.engines.load(publication)

    async def generate(self, request: GenerationRequest, stream: TokenStream | None = None) -> Routed:
        """Raises EngineFailed after the last attempt, or if the stream cannot be restarted."""
        reason = "no engine was tried"
        clock = asyncio.get_running_loop().time
        for _ in range(self._attempts):
            choice = self._choose(request, clock()) or await self._wait_for_engine(request)
            engine, prefill_at, began = choice.engine, choice.prefill_at, clock()
            tokens, max_tokens = len(request.tokens), request.sampling.max_tokens  # the caller's list may grow
            prefill_until = self._reserve(choice, request, began)
            try:
                sent = request if prefill_at is None else await self._prefill(prefill_at, request)
                if stream is not None and isinstance(engine.client, StreamingEngine):
                    completion = await engine.client.stream(sent, stream)
                else:
                    completion = await engine.client.generate(sent)
            except EngineFailed as error:
                reason = str(error)
                self._sessions.pop(request.session, None)
                if isinstance(error, EngineLost):
                    self.engines.lose(engine, reason)
                if stream is not None:
                    stream.on_restart()
            else:
                self._record(request, choice, completion, began=began, prefill_until=prefill_until, ended=clock())
                return Routed(
                    completion=completion,
                    engine=engine.name,
                    pool=engine.pool.name,
                    why=choice.why,
                    predicted_s=choice.prediction.seconds,
                    prefilled_by=prefill_at.name if prefill_at is not None else "",
                )
            finally:
                engine.release(tokens, max_tokens)
        raise EngineFailed(f"{reason} (tried {self._attempts} times)")

    def forget(self, session: str) -> None:
        """The conversation is over."""
        self._sessions.pop(session, None)

    def _choose(self, request: GenerationRequest, now: float) -> RoutingChoice | None:
        cached_at = self._sessions.get(request.session) or self._sessions.get(request.branch_of)
        cached, shared_at, tokens = 0, None, len(request.tokens)
        if cached_at is not None:
            cached = min(cached_at.tokens, tokens - 1) if self._valid(cached_at) else 0  # a branch may be shorter
        elif request.turn == 0:
            same = self._first_prompts.get(fingerprint(request.tokens))
            shared_at = same.engine if same is not None and self._valid(same) else None
        max_tokens = request.sampling.max_tokens
        query = RoutingQuery(
            task=request.task,
            tokens=tokens,
            decoded=self._decode_lengths.expected(request.task, request.turn, max_tokens),
            max_tokens=max_tokens,
            now=now,
            floor=self.engines.floor,
            affinity=self._affinity.get(request.task, "auto"),
            cached_at=cached_at.engine if cached_at is not None else None,
            cached=cached,
            shared_at=shared_at,
        )
        return self._policy.choose(query, self.engines.pools)

    def _valid(self, cached: _CachedAt) -> bool:
        return self._keeps_kv or cached.version == cached.engine.version

    def _reserve(self, choice: RoutingChoice, request: GenerationRequest, now: float) -> float:
        """Count the request where it goes; returns when the prefill there should be done, its own included."""
        engine, tokens = choice.engine, len(request.tokens)
        engine.reserve(tokens, request.sampling.max_tokens)
        engine.pool.expect(choice.prediction.seconds)
        prefilling = choice.prefill_at or engine
        prefilling.add_prefill(choice.prediction.work, now)
        if request.turn == 0:
            if len(self._first_prompts) >= _FIRST_PROMPTS:
                self._first_prompts.popitem(last=False)
            self._first_prompts[fingerprint(request.tokens)] = _CachedAt(engine, tokens - 1, engine.version)
        return prefilling.prefill_until

    async def _prefill(self, engine: EngineState, request: GenerationRequest) -> GenerationRequest:
        """An optimisation: if the prefill fails there, the decoding engine does it itself."""
        tokens = len(request.tokens)
        engine.reserve(tokens, 0)
        try:
            await engine.client.prefill(request)
        except EngineFailed as error:
            if isinstance(error, EngineLost):
                self.engines.lose(engine, str(error))
            return request
        finally:
            engine.release(tokens, 0)
        return replace(request, kv_from=getattr(engine.client, "url", None))

    def _record(
        self,
        request: GenerationRequest,
        choice: RoutingChoice,
        completion: Completion,
        *,
        began: float,
        prefill_until: float,
        ended: float,
    ) -> None:
        engine, pool, made = choice.engine, choice.engine.pool, len(completion.tokens)
        self._decode_lengths.record(request.task, request.turn, made)
        version = completion.versions[-1] if completion.versions else engine.version
        self._sessions[request.session] = _CachedAt(engine, len(request.tokens) + made - 1, version)
        pool.record_request(ended - began)
        if choice.prefill_at is not None or not made:
            return
        first_s, prediction = completion.queue_s + completion.prefill_s, choice.prediction
        prefill_factor, decode_factor = prediction.factors
        if not prediction.room and prediction.wait < prediction.prefill:  # else the queue dominates the measurement
            predicted = (prediction.prefill + prediction.token) / prefill_factor
            pool.record_prefill(predicted, first_s - prediction.wait, completion.prompt - completion.cached)
        pool.record_decode(prediction.token / decode_factor * (made - 1), completion.decode_s, made - 1)
        # Its own prefill was over at its first token; only what came later can be left.
        engine.prefill_until = min(engine.prefill_until, began + first_s + engine.prefill_until - prefill_until)

    async def _wait_for_engine(self, request: GenerationRequest) -> RoutingChoice:
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._max_wait):
                while (choice := self._choose(request, clock())) is None:
                    self.engines.revived.clear()
                    await self.engines.revived.wait()
        except TimeoutError:
            raise EngineFailed(f"no engine came back within {self._max_wait:g} s") from None
        return choice
