"""Which engine a request should go to: decisions over the state of the engines, with no effect on them.

Which pool a conversation of a task belongs to is planned from measured averages (`shares`). Within the pool, and for a
conversation that has KV somewhere, a prediction decides: what the request takes from an engine, times the requests that
are there to wait for it. Every decision has a reason.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Literal, Protocol

from msgspec import Struct, structs

from rollart.rollout.engine_state import EnginePool, EngineState
from rollart.rollout.prediction import Prediction
from rollart.rollout.shares import Shares

Why = Literal["prefix", "group", "fastest", "moved", "disaggregated", "pinned", "fallback", "declared", "turn"]
CLEARLY = 0.8  # leave a cached prefix only for less than this share of the cost of staying


class RoutingQuery(Struct, gc=False):
    """One request: `tokens` of context, an answer of about `decoded` and at most `max_tokens`. `cached_at` has `cached`
    tokens of its KV, and `prefilled_at`, which prefills for it, `prefilled`; `shared_at` got the same prompt before.
    `floor` is the oldest version that may answer."""

    tokens: int
    decoded: float
    max_tokens: int
    now: float
    floor: int
    affinity: str | tuple[str, ...] = "auto"
    cached_at: EngineState | None = None
    cached: int = 0
    shared_at: EngineState | None = None
    task: str = ""
    prefilled_at: EngineState | None = None
    prefilled: int = 0


class RoutingChoice(Struct, gc=False):
    """`prefill_at`: prefill there first, then decode at `engine`."""

    engine: EngineState
    why: Why
    cached: int
    prediction: Prediction
    prefill_at: EngineState | None = None


class RoutingPolicy(Protocol):
    def choose(self, query: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        """None: no engine can take it now."""
        ...


def predict(engine: EngineState, query: RoutingQuery, cached: int) -> Prediction:
    """The request on that engine in its present state."""
    pool, model = engine.pool, engine.pool.predictor
    tokens, decoded, now = query.tokens, query.decoded, query.now
    prefill_factor, decode_factor, max_batch = pool.prefill_factor, pool.decode_factor, pool.max_batch
    load, context = engine.load
    excess = load - max_batch + 1
    room = 0.0
    if excess > 0 or engine.reserved + engine.foreign_kv + tokens + query.max_tokens > pool.kv_tokens:
        room = pool.mean_s * (1 + max(0, excess) / max_batch)
    work, prefill = model.prefill(tokens - cached, cached)
    work *= prefill_factor
    others = int(load) if load < max_batch - 1 else max_batch - 1  # sequences in the same batch
    contexts = context * (others / load) if load else 0.0
    step = model.decode(others + 1, contexts + tokens + decoded / 2)
    token = step * decode_factor / (1.0 - engine.prefill_share(now))
    without = model.decode(others, contexts) if others else 0.0
    return Prediction(
        room=room,
        wait=engine.prefill_until - now if engine.prefill_until > now else 0.0,
        prefill=prefill * prefill_factor,
        token=token,
        decode=decoded * token,
        work=work,
        delay=(1.0 + load) * (work + decoded * ((step - without) * decode_factor)),
        factors=(prefill_factor, decode_factor),
    )


def pinned(query: RoutingQuery, pools: Sequence[EnginePool]) -> tuple[Sequence[EnginePool], Why | None]:
    """The pools that the user's pin allows: the first named one with a usable engine, or all if none has any."""
    if query.affinity in ("auto", "prefill", "decode"):
        return pools, None
    names = (query.affinity,) if isinstance(query.affinity, str) else query.affinity
    for index, name in enumerate(names):
        for pool in pools:
            if pool.of == name and pool.usable(query.floor):
                same = tuple(each for each in pools if each.of == name)
                return same, "pinned" if index == 0 else "fallback"
    return pools, "fallback"


def home(query: RoutingQuery, allowed: Sequence[EnginePool]) -> tuple[EngineState, int, Why] | None:
    """The engine that has its KV, or else its group's, and how much of it, if the request may go there."""
    engine = query.cached_at
    if engine is not None and engine.usable(query.floor) and engine.pool in allowed:
        return engine, min(query.cached, query.tokens - 1), "prefix"
    engine = query.shared_at
    if engine is not None and engine.usable(query.floor) and engine.pool in allowed:
        return engine, query.tokens - 1, "group"
    return None


def stay(query: RoutingQuery, allowed: Sequence[EnginePool]) -> RoutingChoice | None:
    """Stay with the conversation's own KV."""
    known = home(query, allowed)
    if known is None or known[2] != "prefix":
        return None
    return RoutingChoice(known[0], "prefix", known[1], predict(known[0], query, known[1]))


class MeasuredPolicy:
    """By the planned shares of the task's measured shape; within a pool, and for a conversation with KV somewhere, by
    prediction. `disaggregate`: when to prefill on one engine and decode on another: "never", when it should pay
    ("auto"), "always", or always between two pools."""

    def __init__(self, disaggregate: str | tuple[str, str] = "never") -> None:
        self._disaggregate = disaggregate
        self._shares = Shares()

    def choose(self, query: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        allowed, pin = pinned(query, pools)
        shares: dict[str, float] = {}
        if len(pools) > 1:
            self._shares.record(query.task, query.tokens - query.cached, query.tokens, query.decoded)
            shares = self._shares.of(query.task, allowed, query.floor)
        planned = [pool for pool in allowed if pool.name in shares] if shares else allowed
        best = self._stay_or_leave(query, allowed, planned)
        if best is None:
            if shares and len(planned) > 1:
                name = self._shares.pick(query.task, {pool.name: shares[pool.name] for pool in planned})
                planned = [pool for pool in planned if pool.name == name]
            found = _least_loaded(query, planned or allowed) or _least_loaded(query, allowed)
            if not found:
                return None
            engine = min(found, key=lambda engine: engine.reserved)
            moved: Why = "moved" if query.cached_at is not None else "fastest"
            best = RoutingChoice(engine, pin or moved, 0, predict(engine, query, 0))
        if self._disaggregate != "never":
            best = self._disaggregated(query, pools, allowed, best)
        return best

    def _stay_or_leave(
        self, query: RoutingQuery, allowed: Sequence[EnginePool], planned: Sequence[EnginePool]
    ) -> RoutingChoice | None:
        """Where its KV is, unless the task now belongs to other pools, or another engine is clearly better."""
        if (known := home(query, allowed)) is None:
            return None
        here, cached, why = known
        if here.pool not in planned and planned:
            return None
        staying = RoutingChoice(here, why, cached, predict(here, query, cached))
        if here.balanced or (other := here.pool.least_loaded(query.floor)) is None or other is here:
            return staying
        prediction = predict(other, query, 0)
        if prediction.cost >= staying.prediction.cost * (CLEARLY if here is query.cached_at else 1.0):
            return staying
        return RoutingChoice(other, "moved" if here is query.cached_at else "fastest", 0, prediction)

    def _disaggregated(
        self, query: RoutingQuery, pools: Sequence[EnginePool], allowed: Sequence[EnginePool], best: RoutingChoice
    ) -> RoutingChoice:
        """The same request with its prefill on another engine, if that is cheaper; or, if it is demanded, unless the
        engine that decodes has the conversation's KV and does the rest sooner itself. Two pools of which one has no
        usable engine are a reason to fall back."""
        if isinstance(self._disaggregate, tuple):
            pools = [pool for pool in pools if pool.of == self._disaggregate[0]]
            allowed = [pool for pool in allowed if pool.of == self._disaggregate[1]]
        choice, bar = best, best.prediction.cost * CLEARLY if self._disaggregate == "auto" else float("inf")
        for decoding in _candidates(query, allowed, query.cached_at):
            cached = min(query.cached, query.tokens - 1) if decoding is query.cached_at else 0
            decode = predict(decoding, query, query.tokens - 1)
            if cached and bar > (local := predict(decoding, query, cached)).cost:  # little is new: not worth the way
                choice, bar = RoutingChoice(decoding, "prefix", cached, local), local.cost
            for prefilling in _candidates(query, pools, query.prefilled_at or query.cached_at):
                if prefilling.pool is decoding.pool:
                    continue
                fetch_s = decoding.pool.predictor.transfer(query.tokens - cached)
                known = query.prefilled if prefilling is query.prefilled_at else 0
                known = min(query.cached if prefilling is query.cached_at else known, query.tokens - 1)
                prefill = predict(prefilling, query, known)
                both = Prediction(
                    room=prefill.room + decode.room,
                    wait=prefill.wait + decode.wait,
                    prefill=prefill.prefill + fetch_s + decode.prefill,
                    token=decode.token,
                    decode=decode.decode,
                    work=prefill.work,
                    delay=(1 + prefilling.open) * prefill.work + fetch_s + decode.delay,
                    factors=decode.factors,
                )
                if both.cost < bar:
                    choice, bar = RoutingChoice(decoding, "disaggregated", cached, both, prefilling), both.cost
        if choice is best and isinstance(self._disaggregate, tuple):  # an engine of the pair is lost or out of date
            return structs.replace(best, why="fallback")
        return choice


class DeclaredPolicy:
    """By the user's tag alone: the pools that suit it, and there the engine with the fewest open requests."""

    def choose(self, query: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        allowed, pin = pinned(query, pools)
        if query.affinity in ("prefill", "decode"):
            ratio = (max if query.affinity == "prefill" else min)(pool.ratio for pool in pools)
            allowed, pin = [pool for pool in pools if pool.ratio == ratio], "declared"
            if not any(pool.usable(query.floor) for pool in allowed):
                allowed, pin = pools, "fallback"
        if (staying := stay(query, allowed)) is not None:
            return staying
        found = _least_loaded(query, allowed)
        if not found:
            return None
        engine = min(found, key=lambda engine: engine.open)
        return RoutingChoice(engine, pin or "declared", 0, predict(engine, query, 0))


class RoundRobinPolicy:
    """Conversations go to the engines in turn, and stay there."""

    def __init__(self) -> None:
        self._numbers = count()

    def choose(self, query: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        if (staying := stay(query, pools)) is not None:
            return staying
        engines = [engine for pool in pools for engine in pool.engines if engine.usable(query.floor)]
        if not engines:
            return None
        engine = engines[next(self._numbers) % len(engines)]
        return RoutingChoice(engine, "turn", 0, predict(engine, query, 0))


def routing_policy(name: str, disaggregate: str | Sequence[str] = "never") -> RoutingPolicy:
    """Where prefill and decode may have engines of their own, a tag that names one of the two decides nothing."""
    match name:
        case "declared" if disaggregate == "never":
            return DeclaredPolicy()
        case "measured" | "declared":
            return MeasuredPolicy(disaggregate if isinstance(disaggregate, str) else (disaggregate[0], disaggregate[1]))
        case "round_robin":
            return RoundRobinPolicy()
    raise ValueError(f"there is no routing policy {name!r}")


def _least_loaded(query: RoutingQuery, pools: Sequence[EnginePool]) -> list[EngineState]:
    return [engine for pool in pools if (engine := pool.least_loaded(query.floor)) is not None]


def _candidates(query: RoutingQuery, pools: Sequence[EnginePool], known: EngineState | None) -> Iterable[EngineState]:
    """One of each pool: the engine that is `known` to have the conversation's KV, else the least loaded."""
    for pool in pools:
        if known is not None and known.pool is pool and known.usable(query.floor):
            yield known
        elif (engine := pool.least_loaded(query.floor)) is not None:
            yield engine
