"""Engines as the router sees them: pools of the same device class, and in them one place for each engine."""

import asyncio
import math
from dataclasses import dataclass, field

from rollart.core.protocols import Engine
from rollart.hardware.devices import CATALOGUE
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.rollout.prediction import Predictor

RATE = 0.05
LEAST, MOST = 0.01, 100.0
TELLING = 64  # tokens whose time tells as much as any number of them
ALL = 8  # engines of a pool that are all looked at; of more, a few in turn
SOME = 4
RECENT = 4.0  # mean requests, that count for how busy an engine is with prefill
BUSIEST = 0.9
UNEVEN = 1.1  # times its share that an engine may have before others are looked at

TINY = ModelShape(dense=1_000_000, layers=4, heads=4, kv_heads=2, head_dim=32)
CPU = Roofline(CATALOGUE["cpu"], TINY)


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine and what the router has sent it. `prefill_until` is when its prefill backlog should be done; `foreign`
    and `foreign_kv` are the sequences, and the KV that they will need, that the engine has from others."""

    name: str
    pool: "EnginePool"
    engine: Engine
    version: int
    alive: bool = True
    draining: bool = False
    open: int = 0
    served: int = 0
    context: int = 0
    reserved: int = 0
    prefill_until: float = 0.0
    usual_open: float = 0.0
    usual_context: float = 0.0
    recent_work: float = 0.0
    recent_at: float = 0.0
    foreign: int = 0
    foreign_kv: int = 0
    unexplained: tuple[int, int] = (0, 0)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def usable(self, floor: int) -> bool:
        return self.alive and not self.draining and self.version >= floor

    def take(self, tokens: int, most: int) -> None:
        """Count a request with so many tokens of context and at most so many to come."""
        self.open += 1
        self.served += 1
        self.context += tokens
        self.reserved += tokens + most
        self.pool.reserved += tokens + most
        self.usual_open += RATE * (self.open - self.usual_open)
        self.usual_context += RATE * (self.context - self.usual_context)

    def give_back(self, tokens: int, most: int) -> None:
        self.open -= 1
        self.context -= tokens
        self.reserved -= tokens + most
        self.pool.reserved -= tokens + most

    def prefill(self, work: float, now: float) -> None:
        """Count so many seconds of prefill."""
        self.prefill_until = max(self.prefill_until, now) + work
        self.recent_work = self._recent(now) + work
        self.recent_at = now

    def prefilling(self, now: float) -> float:
        """The share of its time that went into prefill lately."""
        return min(BUSIEST, self._recent(now) / (RECENT * self.pool.mean_s)) if self.pool.mean_s else 0.0

    def _recent(self, now: float) -> float:
        span = RECENT * self.pool.mean_s
        return self.recent_work * math.exp(-(now - self.recent_at) / span) if span else 0.0

    @property
    def fair(self) -> bool:
        """Whether it has about its share of the pool's work, or less."""
        return self.reserved * len(self.pool.places) <= UNEVEN * self.pool.reserved and not self.foreign


@dataclass(slots=True, eq=False)
class EnginePool:
    """Engines of one device class. Each runs `max_batch` sequences at once and keeps the KV of `kv_tokens` tokens.

    `of` is the name of the user's pool, which can have engines of several classes, and so several of these. Real times
    over predicted ones are averaged here: a roofline knows neither the engine's overheads nor the host's.
    """

    name: str
    roofline: Roofline = CPU
    max_batch: int = 64
    kv_tokens: int = 1 << 40
    places: list[EngineState] = field(default_factory=list)
    of: str = ""
    predictor: Predictor = field(init=False)
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    mean_s: float = 0.0
    reserved: int = 0
    _turn: int = 0

    def __post_init__(self) -> None:
        self.predictor = Predictor(self.roofline)
        self.of = self.of or self.name

    @property
    def ratio(self) -> float:
        """FLOP/s per byte/s: high for devices that suit prefill, low for those that suit decode."""
        return self.roofline.device.tflops / self.roofline.device.bandwidth

    def usable(self, floor: int) -> bool:
        """Whether some engine of it is."""
        for place in self.places:  # noqa: SIM110 (it is asked on every turn; a generator costs more than the answer)
            if place.usable(floor):
                return True
        return False

    def least_loaded(self, floor: int) -> EngineState | None:
        """The usable engine with the least to do; of a large pool, the best of a few looked at in turn."""
        places = self.places
        if len(places) > ALL:
            self._turn = (self._turn + SOME) % len(places)
            some = places[self._turn : self._turn + SOME]
            best = _best(some + places[: SOME - len(some)], floor)
            if best is not None:
                return best
        return _best(places, floor)

    def learn_prefill(self, roofline: float, actual: float, tokens: int) -> None:
        """Seconds of the prefill of so many tokens, as the roofline says and as they were."""
        self.prefill_factor = _towards(self.prefill_factor, actual, roofline, tokens)

    def learn_decode(self, roofline: float, actual: float, tokens: int) -> None:
        """The same for so many decoded tokens."""
        self.decode_factor = _towards(self.decode_factor, actual, roofline, tokens)

    def expect(self, seconds: float) -> None:
        """Before anything was measured, what is predicted has to do."""
        self.mean_s = self.mean_s or seconds

    def took(self, seconds: float) -> None:
        self.mean_s += RATE * (seconds - self.mean_s)


def _best(places: list[EngineState], floor: int) -> EngineState | None:
    best, least = None, 0
    for place in places:
        if place.usable(floor):
            load = place.reserved + place.foreign_kv
            if best is None or load < least or (load == least and place.served < best.served):
                best, least = place, load
    return best


def _towards(factor: float, actual: float, roofline: float, tokens: int) -> float:
    """A step towards the factor that would have been right, in proportion; few tokens say little."""
    if roofline <= 0.0 or actual <= 0.0:
        return factor
    right = min(MOST, max(LEAST, actual / roofline))
    return float(factor * (right / factor) ** (RATE * min(1.0, tokens / TELLING)))
