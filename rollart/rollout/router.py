"""Which engine serves a request, and what happens when it does not.

Invariants: a request goes only to an engine that lives, is not draining and has at least version `floor`; if there is
none it waits, with a deadline. A request is tried at most `attempts` times. Cancelling `generate` aborts the request at
the engine. What a request adds to an engine's load is taken off again, once, however it ends.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import Struct

from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.events import EventSink
from rollart.core.protocols import Engine, StreamingEngine, TokenStream
from rollart.core.run_length import fingerprint
from rollart.core.types import Completion, GenerationRequest
from rollart.rollout.decode_lengths import DecodeLengths
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EnginePool, EngineState
from rollart.rollout.routing_policy import MeasuredPolicy, RoutingChoice, RoutingPolicy, RoutingQuery, Why

_PATIENCE_S = 120.0
_OPENINGS = 4096


class Routed(Struct):
    """An answer, the engine and pool that gave it, why it was asked, and the seconds that were predicted for it."""

    completion: Completion
    engine: str
    pool: str
    why: Why
    predicted_s: float
    prefilled_by: str = ""


class _Held(Struct):
    """Where a conversation's KV is: `cached` tokens, made by `version`."""

    place: EngineState
    cached: int
    version: int


class Router(EngineRegistry):
    """The roster of engines, and what is sent to them. `keeps_kv`: KV survives a weight swap. `patience`: how long a
    request waits for an engine that may have it."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        version: int,
        sink: EventSink,
        *,
        pools: Mapping[str, EnginePool] | None = None,
        policy: RoutingPolicy | None = None,
        affinity: Mapping[str, str | tuple[str, ...]] | None = None,
        shapes: DecodeLengths | None = None,
        on_lost: Callable[[str], None] = lambda name: None,
        attempts: int = 3,
        keeps_kv: bool = False,
        patience: float = _PATIENCE_S,
    ) -> None:
        super().__init__(engines, version, sink, pools or {}, on_lost)
        self.shapes = shapes or DecodeLengths()
        self._patience = patience
        self._policy = policy or MeasuredPolicy()
        self._affinity = dict(affinity or {})
        self._sessions: dict[str, _Held] = {}
        self._openings: OrderedDict[int, _Held] = OrderedDict()  # a plain dict is slow to lose its first key
        self._attempts, self._keeps_kv = attempts, keeps_kv

    async def generate(self, request: GenerationRequest, listener: TokenStream | None = None) -> Routed:
        """Raises EngineFailed after the last attempt, or if the listener cannot do with another one."""
        reason = "no engine was tried"
        clock = asyncio.get_running_loop().time
        for _ in range(self._attempts):
            choice = self._choose(request, clock()) or await self._revival(request)
            place, began = choice.place, clock()
            tokens, most = len(request.tokens), request.sampling.max_tokens  # the context grows while it is away
            until = self._begin(choice, request, began)
            try:
                asked = request
                if choice.prefill_at is not None:
                    choice.prefill_at.take(tokens, 0)
                    try:
                        asked = await self._prefill(choice.prefill_at, request)
                    finally:
                        choice.prefill_at.give_back(tokens, 0)
                if listener is not None and isinstance(place.engine, StreamingEngine):
                    completion = await place.engine.stream(asked, listener)
                else:
                    completion = await place.engine.generate(asked)
            except EngineFailed as error:
                reason = str(error)
                self._sessions.pop(request.session, None)
                if isinstance(error, EngineLost):
                    self._lose(place, reason)
                if listener is not None:
                    listener.on_restart()
            else:
                self._learn(request, choice, completion, began, until, clock() - began)
                prefilled_by = choice.prefill_at.name if choice.prefill_at is not None else ""
                return Routed(
                    completion, place.name, place.pool.name, choice.why, choice.prediction.seconds, prefilled_by
                )
            finally:
                place.give_back(tokens, most)
        raise EngineFailed(f"{reason} (tried {self._attempts} times)")

    def _choose(self, request: GenerationRequest, now: float) -> RoutingChoice | None:
        held = self._sessions.get(request.session) or self._sessions.get(request.branch_of)
        cached, shared, tokens = 0, None, len(request.tokens)
        if held is not None:
            cached = held.cached if self._keeps_kv or held.version == held.place.version else 0
            cached = min(cached, tokens - 1)  # a branch may be shorter than what it left
        elif request.turn == 0:
            opened = self._openings.get(fingerprint(request.tokens))
            if opened is not None and (self._keeps_kv or opened.version == opened.place.version):
                shared = opened.place
        most = request.sampling.max_tokens
        ask = RoutingQuery(
            tokens,
            self.shapes.decoded(request.task, request.turn, most),
            most,
            now,
            self.floor,
            self._affinity.get(request.task, "auto"),
            held.place if held is not None else None,
            cached,
            shared,
            request.task,
        )
        return self._policy.choose(ask, self._kinds)

    def _begin(self, choice: RoutingChoice, request: GenerationRequest, now: float) -> float:
        """Counts the request where it goes; answers when the prefill there should be done, its own included."""
        place, tokens = choice.place, len(request.tokens)
        place.take(tokens, request.sampling.max_tokens)
        busy = choice.prefill_at or place
        place.pool.expect(choice.prediction.seconds)
        busy.prefill(choice.prediction.work, now)
        if request.turn == 0:
            if len(self._openings) >= _OPENINGS:
                self._openings.popitem(last=False)
            self._openings[fingerprint(request.tokens)] = _Held(place, tokens - 1, place.version)
        return busy.prefill_until

    async def _prefill(self, place: EngineState, request: GenerationRequest) -> GenerationRequest:
        """A hand-over is an optimisation: if the prefill fails there, the decoding engine does it itself."""
        address = getattr(place.engine, "url", None)
        try:
            await place.engine.prefill(request)
        except EngineFailed as error:
            if isinstance(error, EngineLost):
                self._lose(place, str(error))
            return request
        return replace(request, kv_from=address)

    def _learn(
        self,
        request: GenerationRequest,
        choice: RoutingChoice,
        completion: Completion,
        began: float,
        until: float,
        seconds: float,
    ) -> None:
        place, pool, made = choice.place, choice.place.pool, len(completion.tokens)
        self.shapes.saw(request.task, request.turn, made)
        version = completion.versions[-1] if completion.versions else place.version
        self._sessions[request.session] = _Held(place, len(request.tokens) + made - 1, version)
        pool.took(seconds)
        if choice.prefill_at is not None or not made:
            return
        first_s, prediction = completion.queue_s + completion.prefill_s, choice.prediction
        prefill_factor, decode_factor = prediction.factors
        if not prediction.room and prediction.wait < prediction.prefill:  # else it tells of the queue
            roofline = (prediction.prefill + prediction.token) / prefill_factor
            pool.learn_prefill(roofline, first_s - prediction.wait, completion.prompt - completion.cached)
        pool.learn_decode(prediction.token / decode_factor * (made - 1), completion.decode_s, made - 1)
        # Its own prefill was over at its first token; what came later is all that can be left.
        place.prefill_until = min(place.prefill_until, began + first_s + place.prefill_until - until)

    async def _revival(self, request: GenerationRequest) -> RoutingChoice:
        """Wait until some engine may have the request."""
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._patience):
                while (choice := self._choose(request, clock())) is None:
                    self._revived.clear()
                    await self._revived.wait()
        except TimeoutError:
            raise EngineFailed(f"no engine came back within {self._patience:g} s") from None
        return choice

    def forget(self, session: str) -> None:
        """The conversation is over."""
        self._sessions.pop(session, None)
