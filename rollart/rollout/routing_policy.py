"""Where a request should go: decisions over the state of the places, with no side effects.

Which pool a conversation of a task belongs to is planned from measured averages (`shares`). Within the pool, and for a
conversation that has KV somewhere, a prediction decides: what the request takes from an engine, times the requests that
are there to wait for it. Every decision has a reason.
"""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Literal, Protocol

from msgspec import Struct

from rollart.rollout.engine_state import EnginePool, EngineState
from rollart.rollout.prediction import Prediction
from rollart.rollout.shares import Shares

Why = Literal["prefix", "group", "fastest", "moved", "handed over", "pinned", "fallback", "declared", "turn"]
CLEARLY = 0.8  # leave a cached prefix only for less than this share of the cost of staying


class RoutingQuery(Struct):
    """One request: `tokens` of context, an answer of about `decoded` and at most `most`. `held` keeps `cached` tokens
    of its KV; `shared` is where the same prompt was sent before. `floor` is the oldest version that may answer."""

    tokens: int
    decoded: float
    most: int
    now: float
    floor: int
    affinity: str | tuple[str, ...] = "auto"
    held: EngineState | None = None
    cached: int = 0
    shared: EngineState | None = None
    task: str = ""


class RoutingChoice(Struct):
    """`prefill_at`: prefill there first, then decode at `place`."""

    place: EngineState
    why: Why
    cached: int
    prediction: Prediction
    prefill_at: EngineState | None = None


class RoutingPolicy(Protocol):
    def choose(self, ask: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        """None: no engine may have it now."""
        ...


def predict(place: EngineState, ask: RoutingQuery, cached: int) -> Prediction:
    """The request on that engine as things stand."""
    pool, model = place.pool, place.pool.predictor
    tokens, decoded = ask.tokens, ask.decoded
    there = max(place.open, place.usual_open) + place.foreign
    full = there - pool.max_batch + 1
    room = 0.0
    if full > 0 or place.reserved + place.foreign_kv + tokens + ask.most > pool.kv_tokens:
        room = pool.mean_s * (1 + max(0, full) / pool.max_batch)
    new = tokens - cached
    work = model.compute(new, cached) * pool.prefill_factor
    prefill = max(work, model.prefill(new, cached) * pool.prefill_factor)
    beside = int(min(there, pool.max_batch - 1))
    contexts = (max(place.context, place.usual_context) + place.foreign_kv) * (beside / there if there else 0.0)
    apart = 1.0 - place.prefilling(ask.now)  # what prefill leaves of its time
    step = model.decode(beside + 1, contexts + tokens + decoded / 2)
    token = step * pool.decode_factor / apart
    wait = max(0.0, place.prefill_until - ask.now)
    alone = model.decode(beside, contexts) if beside else 0.0
    others = (1.0 + there) * (work + decoded * ((step - alone) * pool.decode_factor))
    factors = (pool.prefill_factor, pool.decode_factor)
    return Prediction(room, wait, prefill, token, decoded * token, work, others, factors)


def pinned(ask: RoutingQuery, pools: Sequence[EnginePool]) -> tuple[Sequence[EnginePool], Why | None]:
    """The pools that the user's pin allows: the first named one with a usable engine, or all if none has any."""
    if ask.affinity in ("auto", "prefill", "decode"):
        return pools, None
    wanted = (ask.affinity,) if isinstance(ask.affinity, str) else ask.affinity
    for index, name in enumerate(wanted):
        for pool in pools:
            if pool.of == name and pool.usable(ask.floor):
                same = tuple(each for each in pools if each.of == name)
                return same, "pinned" if index == 0 else "fallback"
    return pools, "fallback"


def home(ask: RoutingQuery, allowed: Sequence[EnginePool]) -> tuple[EngineState, int, Why] | None:
    """Where its KV, or else its group's, already is, how much of it, if it may go there."""
    place = ask.held
    if place is not None and place.usable(ask.floor) and place.pool in allowed:
        return place, min(ask.cached, ask.tokens - 1), "prefix"
    place = ask.shared
    if place is not None and place.usable(ask.floor) and place.pool in allowed:
        return place, ask.tokens - 1, "group"
    return None


def kept(ask: RoutingQuery, allowed: Sequence[EnginePool]) -> RoutingChoice | None:
    """Stay with the conversation's own KV."""
    known = home(ask, allowed)
    if known is None or known[2] != "prefix":
        return None
    return RoutingChoice(known[0], "prefix", known[1], predict(known[0], ask, known[1]))


class MeasuredPolicy:
    """By the planned shares of the task's measured shape; within a pool, and for a conversation with KV somewhere, by
    prediction. `hand_over`: when to prefill on one engine and decode on another: never, when it should pay, always, or
    always between two pools."""

    def __init__(self, hand_over: str | tuple[str, str] = "never") -> None:
        self._hand_over = hand_over
        self._shares = Shares()

    def choose(self, ask: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        allowed, pin = pinned(ask, pools)
        shares: dict[str, float] = {}
        if len(pools) > 1:
            self._shares.saw(ask.task, ask.tokens - ask.cached, ask.tokens, ask.decoded)
            shares = self._shares.of(ask.task, allowed, ask.floor)
        wanted = [pool for pool in allowed if pool.name in shares] if shares else allowed
        best = self._stay(ask, allowed, wanted)
        if best is None:
            if shares and len(wanted) > 1:
                name = self._shares.pick(ask.task, {pool.name: shares[pool.name] for pool in wanted})
                wanted = [pool for pool in wanted if pool.name == name]
            found = [place for pool in wanted or allowed if (place := pool.least_loaded(ask.floor)) is not None]
            found = found or [place for pool in allowed if (place := pool.least_loaded(ask.floor)) is not None]
            if not found:
                return None
            place = min(found, key=lambda place: place.reserved)
            moved: Why = "moved" if ask.held is not None else "fastest"
            best = RoutingChoice(place, pin or moved, 0, predict(place, ask, 0))
        if self._hand_over != "never":
            best = self._handed_over(ask, pools, allowed, best)
        return best

    def _stay(
        self, ask: RoutingQuery, allowed: Sequence[EnginePool], wanted: Sequence[EnginePool]
    ) -> RoutingChoice | None:
        """Where its KV is, unless the task belongs to other pools by now, or another engine is clearly better."""
        if (known := home(ask, allowed)) is None:
            return None
        here, cached, why = known
        if here.pool not in wanted and wanted:
            return None
        stay = RoutingChoice(here, why, cached, predict(here, ask, cached))
        if here.fair or (other := here.pool.least_loaded(ask.floor)) is None or other is here:
            return stay
        prediction = predict(other, ask, 0)
        if prediction.cost >= stay.prediction.cost * (CLEARLY if here is ask.held else 1.0):
            return stay
        return RoutingChoice(other, "moved" if here is ask.held else "fastest", 0, prediction)

    def _handed_over(
        self, ask: RoutingQuery, pools: Sequence[EnginePool], allowed: Sequence[EnginePool], best: RoutingChoice
    ) -> RoutingChoice:
        """The same request with its prefill elsewhere, if that is wanted, or cheaper."""
        first = [pool for pool in pools if not isinstance(self._hand_over, tuple) or pool.of == self._hand_over[0]]
        last = [pool for pool in allowed if not isinstance(self._hand_over, tuple) or pool.of == self._hand_over[1]]
        choice, bar = best, best.prediction.cost * CLEARLY if self._hand_over == "auto" else float("inf")
        for decoding in _open(ask, last):
            cached = min(ask.cached, ask.tokens - 1) if decoding is ask.held else 0
            decode = predict(decoding, ask, ask.tokens - 1)
            for prefilling in _open(ask, first):
                if prefilling.pool is decoding.pool:
                    continue
                fetched = decoding.pool.predictor.transfer(ask.tokens - cached)
                prefill = predict(prefilling, ask, min(ask.cached, ask.tokens - 1) if prefilling is ask.held else 0)
                both = Prediction(
                    prefill.room + decode.room,
                    prefill.wait + decode.wait,
                    prefill.prefill + fetched + decode.prefill,
                    decode.token,
                    decode.decode,
                    prefill.work,
                    prefilling.open * prefill.work + decode.others,
                    decode.factors,
                )
                if both.cost < bar:
                    choice, bar = RoutingChoice(decoding, "handed over", cached, both, prefilling), both.cost
        return choice


class DeclaredPolicy:
    """By the user's tag alone: the pools that suit it, and there the engine with the fewest open requests."""

    def choose(self, ask: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        allowed, pin = pinned(ask, pools)
        if ask.affinity in ("prefill", "decode"):
            ratio = (max if ask.affinity == "prefill" else min)(pool.ratio for pool in pools)
            allowed, pin = [pool for pool in pools if pool.ratio == ratio], "declared"
            if not any(pool.usable(ask.floor) for pool in allowed):
                allowed, pin = pools, "fallback"
        if (stay := kept(ask, allowed)) is not None:
            return stay
        found = [least for pool in allowed if (least := pool.least_loaded(ask.floor)) is not None]
        if not found:
            return None
        place = min(found, key=lambda place: place.open)
        return RoutingChoice(place, pin or "declared", 0, predict(place, ask, 0))


class RoundRobinPolicy:
    """Conversations go to the engines in turn, and stay there."""

    def __init__(self) -> None:
        self._numbers = count()

    def choose(self, ask: RoutingQuery, pools: Sequence[EnginePool]) -> RoutingChoice | None:
        if (stay := kept(ask, pools)) is not None:
            return stay
        places = [place for pool in pools for place in pool.places if place.usable(ask.floor)]
        if not places:
            return None
        place = places[next(self._numbers) % len(places)]
        return RoutingChoice(place, "turn", 0, predict(place, ask, 0))


def policy(name: str, hand_over: str | Sequence[str] = "never") -> RoutingPolicy:
    match name:
        case "measured":
            return MeasuredPolicy(hand_over if isinstance(hand_over, str) else (hand_over[0], hand_over[1]))
        case "declared":
            return DeclaredPolicy()
        case "round_robin":
            return RoundRobinPolicy()
    raise ValueError(f"there is no routing policy {name!r}")


def _open(ask: RoutingQuery, pools: Sequence[EnginePool]) -> Iterable[EngineState]:
    for pool in pools:
        if ask.held is not None and ask.held.pool is pool and ask.held.usable(ask.floor):
            yield ask.held
        elif (place := pool.least_loaded(ask.floor)) is not None:
            yield place
