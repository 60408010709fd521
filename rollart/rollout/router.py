"""Sends each request to an engine, and to another one if that fails.

Invariants: a request goes only to an engine that is alive, is not draining and has at least version `floor`; if there
is none it waits for as long as the registry has an engine that may come back, and the clock of its episode stands still
meanwhile: whoever restarts engines decides when to give one up. An answer whose engine fails goes on at another one,
from the tokens that there are; it is given up after `attempts` failures without a new token. Cancelling `generate`
aborts the request at the engine. What a request adds to the load of an engine is taken off again, once, however it
ends.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from itertools import count

from msgspec import Struct

from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.types import Completion, GenerationRequest
from rollart.rollout.decode_lengths import DecodeLengths
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EngineState
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.requests import Answer, RequestLoop, Routed, RouteNeed, ServedRequest
from rollart.rollout.routing_policy import MeasuredPolicy, RoutingChoice, RoutingPolicy, RoutingQuery

_FIRST_PROMPTS = 4096


class _CachedAt(Struct, gc=False):
    """Where a conversation's KV is: `tokens` of it, made by `version`."""

    engine: EngineState
    tokens: int
    version: int


class RouteTicket(Struct, gc=False):
    """What was decided for a request, and when; `prefill_until` is when the prefill there should be done, its own
    included. `prefilling`: its context is being prefilled at another engine."""

    choice: RoutingChoice
    need: RouteNeed
    began: float
    prefill_until: float
    prefilling: bool = False


class Router(RequestLoop[RouteTicket]):
    """`affinity` is what the run file declares for each task. `keeps_kv`: KV survives a weight swap."""

    def __init__(
        self,
        engines: EngineRegistry,
        *,
        policy: RoutingPolicy | None = None,
        affinity: Mapping[str, str | tuple[str, ...]] | None = None,
        decode_lengths: DecodeLengths | None = None,
        attempts: int = 3,
        keeps_kv: bool = False,
    ) -> None:
        super().__init__(attempts)
        self.engines = engines
        self._decode_lengths = decode_lengths or DecodeLengths()
        self._policy = policy or MeasuredPolicy()
        self._affinity = dict(affinity or {})
        self._sessions: dict[str, _CachedAt] = {}
        self._prefixes: dict[str, _CachedAt] = {}  # of conversations that are prefilled on an engine of their own
        self._first_prompts: OrderedDict[int, _CachedAt] = OrderedDict()  # a plain dict is slow to lose its first key
        self._in_flight: dict[str, EngineState] = {}  # by session; of several requests of one, the last
        self._conversations = count(1)
        self._keeps_kv = keeps_kv

    @cached_property
    def _clock(self) -> Callable[[], float]:
        """Of the event loop that all requests are on: asking for that loop costs a system call."""
        return asyncio.get_running_loop().time

    def pool_of(self, session: str) -> str:
        """The pool that answers a request of this conversation now; "" if none does."""
        engine = self._in_flight.get(session)
        return engine.pool.name if engine is not None else ""

    def admit(self, need: RouteNeed) -> RouteTicket | None:
        """Reserve the engine that suits the request best; None if none can take it now."""
        now = self._clock()
        choice = self._choose(need, now)
        if choice is None:
            return None
        self._in_flight[need.session] = choice.engine
        return RouteTicket(choice, need, now, self._reserve(choice, need, now))

    async def wait_for_engine(self, need: RouteNeed, clock: EpisodeClock | None = None) -> RouteTicket:
        """As `admit`, as soon as an engine can take it. Raises EngineFailed when none is left."""
        with clock.paused() if clock is not None else nullcontext():
            while (ticket := self.admit(need)) is None:
                if self.engines.empty:
                    raise EngineFailed("no engine is left")
                self.engines.revived.clear()
                await self.engines.revived.wait()
        return ticket

    def _attempt(self, route: RouteTicket, rest: GenerationRequest, answer: Answer) -> Awaitable[Completion]:
        if route.choice.prefill_at is not None:
            return self._prefill_and_decode(route, rest, answer)
        return self._decode(route, rest, answer)

    async def _prefill_and_decode(self, route: RouteTicket, rest: GenerationRequest, answer: Answer) -> Completion:
        return await self._decode(route, await self._prefill(route, rest), answer)

    def _decode(self, route: RouteTicket, rest: GenerationRequest, answer: Answer) -> Awaitable[Completion]:
        engine = route.choice.engine
        if engine.streaming is None:
            return engine.client.generate(rest)
        return engine.streaming.generate_in_parts(rest, answer.every, answer.on_part)

    def record_failure(self, route: RouteTicket, reason: str, lost: bool) -> None:
        self._sessions.pop(route.need.session, None)
        if lost:
            self.engines.lose(route.choice.engine, reason)

    def release(self, route: RouteTicket) -> None:
        need = route.need
        self.end_prefill(route)
        self._in_flight.pop(need.session, None)
        route.choice.engine.release(need.tokens, need.max_tokens)

    def _routed(self, route: RouteTicket, completion: Completion) -> Routed:
        choice = route.choice
        return Routed(
            completion=completion,
            engine=choice.engine.name,
            pool=choice.engine.pool.name,
            why=choice.why,
            predicted_s=choice.prediction.seconds,
            prefilled_by=choice.prefill_at.name if choice.prefill_at is not None else "",
        )

    def new_conversation(self) -> int:
        """A number that no other conversation with these engines has, that of an earlier attempt of the same name
        included."""
        return next(self._conversations)

    def forget(self, session: str) -> None:
        """The conversation is over."""
        self._sessions.pop(session, None)
        self._prefixes.pop(session, None)

    def _choose(self, need: RouteNeed, now: float) -> RoutingChoice | None:
        cached_at = self._sessions.get(need.session)
        if cached_at is None and need.branch_of:
            cached_at = self._sessions.get(need.branch_of)
        cached, shared_at, tokens = 0, None, need.tokens
        if cached_at is not None:
            cached = min(cached_at.tokens, tokens - 1) if self._valid(cached_at) else 0  # a branch may be shorter
        elif need.turn == 0:
            same = self._first_prompts.get(need.fingerprint)
            shared_at = same.engine if same is not None and self._valid(same) else None
        query = RoutingQuery(
            task=need.task,
            tokens=tokens,
            decoded=self._decode_lengths.expected(need.task, need.turn, need.max_tokens),
            max_tokens=need.max_tokens,
            now=now,
            floor=self.engines.floor,
            affinity=self._affinity.get(need.task, "auto"),
            cached_at=cached_at.engine if cached_at is not None else None,
            cached=cached,
            shared_at=shared_at,
        )
        if self._prefixes and (prefix := self._prefixes.get(need.session)) is not None:
            query.prefilled_at, query.prefilled = prefix.engine, prefix.tokens if self._valid(prefix) else 0
        return self._policy.choose(query, self.engines.pools)

    def _valid(self, cached: _CachedAt) -> bool:
        return self._keeps_kv or cached.version == cached.engine.version

    def _reserve(self, choice: RoutingChoice, need: RouteNeed, now: float) -> float:
        """Count the request where it goes; returns when the prefill there should be done, its own included."""
        engine, tokens = choice.engine, need.tokens
        engine.reserve(tokens, need.max_tokens)
        engine.pool.expect(choice.prediction.seconds)
        prefilling = choice.prefill_at or engine
        prefilling.add_prefill(choice.prediction.work, now)
        if need.turn == 0:
            if len(self._first_prompts) >= _FIRST_PROMPTS:
                self._first_prompts.popitem(last=False)
            self._first_prompts[need.fingerprint] = _CachedAt(engine, tokens - 1, engine.version)
        return prefilling.prefill_until

    async def _prefill(self, route: RouteTicket, request: GenerationRequest) -> GenerationRequest:
        """An optimisation: if the prefill fails there, the decoding engine does it itself."""
        engine = self.begin_prefill(route)
        try:
            await engine.client.prefill(request)
        except EngineFailed as error:
            if isinstance(error, EngineLost):
                self.engines.lose(engine, str(error))
            return request
        finally:
            self.end_prefill(route)
        self.record_prefill(route)
        return replace(request, kv_from=getattr(engine.client, "url", None))

    def begin_prefill(self, route: RouteTicket) -> EngineState:
        engine = route.choice.prefill_at
        assert engine is not None
        route.prefilling = True
        engine.reserve(route.need.tokens, 0)
        return engine

    def end_prefill(self, route: RouteTicket) -> None:
        if route.prefilling and route.choice.prefill_at is not None:
            route.prefilling = False
            route.choice.prefill_at.release(route.need.tokens, 0)

    def record_prefill(self, route: RouteTicket) -> None:
        """The whole context was prefilled at that engine."""
        engine = route.choice.prefill_at
        assert engine is not None
        self._prefixes[route.need.session] = _CachedAt(engine, route.need.tokens - 1, engine.version)

    def record(self, route: RouteTicket, served: ServedRequest) -> None:
        choice, need, ended = route.choice, route.need, self._clock()
        engine, pool, made = choice.engine, choice.engine.pool, served.made
        version = served.version if served.version is not None else engine.version
        self._sessions[need.session] = _CachedAt(engine, need.tokens + made - 1, version)
        self._decode_lengths.record(need.task, need.turn, served.answer)
        pool.record_request(ended - route.began)
        if choice.prefill_at is not None or not made:
            return
        first_s, prediction = served.queue_s + served.prefill_s, choice.prediction
        prefill_factor, decode_factor = prediction.factors
        if not prediction.room and prediction.wait < prediction.prefill:  # else the queue dominates the measurement
            predicted = (prediction.prefill + prediction.token) / prefill_factor
            pool.record_prefill(predicted, first_s - prediction.wait, served.prompt - served.cached)
        pool.record_decode(prediction.token / decode_factor * (made - 1), served.decode_s, made - 1)
        # Its own prefill was over at its first token; only what came later can be left.
        left = engine.prefill_until - route.prefill_until
        engine.prefill_until = min(engine.prefill_until, route.began + first_s + left)
