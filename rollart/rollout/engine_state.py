"""Engines as the router sees them: pools of one device class, and the load of each engine in them."""

import asyncio
import math
from dataclasses import dataclass, field

from rollart.core.protocols import Engine, StreamingEngine
from rollart.hardware.devices import CATALOGUE
from rollart.hardware.roofline import ModelShape, Roofline
from rollart.rollout.prediction import Predictor

RATE = 0.05  # of the moving averages
FACTOR_MIN, FACTOR_MAX = 0.01, 100.0
FULL_WEIGHT_TOKENS = 64  # samples of fewer tokens count for less
SCAN_ALL_BELOW, SCAN_SAMPLE = 8, 4  # of larger pools, a sample of engines is compared, in rotation
PREFILL_WINDOW = 4.0  # mean requests, over which the share of prefill is averaged
PREFILL_SHARE_MAX = 0.9
IMBALANCE = 1.1  # times its share that an engine may have before others are considered

TINY = ModelShape(dense=1_000_000, layers=4, heads=4, kv_heads=2, head_dim=32)
CPU = Roofline(CATALOGUE["cpu"], TINY)


@dataclass(slots=True, eq=False)
class EngineState:
    """One engine and what the router has sent it. `prefill_until` is when its prefill backlog should be done; `foreign`
    and `foreign_kv` count sequences that other clients sent it, and the KV that they will need."""

    name: str
    pool: "EnginePool"
    client: Engine
    version: int
    streaming: StreamingEngine | None = None  # the client, if it can stream
    alive: bool = True
    draining: bool = False
    open: int = 0
    served: int = 0
    context: int = 0
    reserved: int = 0
    prefill_until: float = 0.0
    mean_open: float = 0.0
    mean_context: float = 0.0
    recent_prefill: float = 0.0
    recent_at: float = 0.0
    foreign: int = 0
    foreign_kv: int = 0
    last_excess: tuple[int, int] = (0, 0)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    def usable(self, floor: int) -> bool:
        return self.alive and not self.draining and self.version >= floor

    def reserve(self, tokens: int, max_tokens: int) -> None:
        """Count a request with `tokens` of context that may generate up to `max_tokens`."""
        self.open += 1
        self.served += 1
        self.context += tokens
        self.reserved += tokens + max_tokens
        self.pool.reserved += tokens + max_tokens
        self.mean_open += RATE * (self.open - self.mean_open)
        self.mean_context += RATE * (self.context - self.mean_context)

    def release(self, tokens: int, max_tokens: int) -> None:
        self.open -= 1
        self.context -= tokens
        self.reserved -= tokens + max_tokens
        self.pool.reserved -= tokens + max_tokens

    @property
    def load(self) -> tuple[float, float]:
        """Sequences that a request will meet there, and the tokens of their contexts."""
        sequences = self.open if self.open > self.mean_open else self.mean_open
        context = self.context if self.context > self.mean_context else self.mean_context
        return sequences + self.foreign, context + self.foreign_kv

    def add_prefill(self, seconds: float, now: float) -> None:
        self.prefill_until = (self.prefill_until if self.prefill_until > now else now) + seconds
        self.recent_prefill = self._recent(now) + seconds
        self.recent_at = now

    def prefill_share(self, now: float) -> float:
        """The share of its time that recently went into prefill."""
        window = PREFILL_WINDOW * self.pool.mean_s
        share = self._recent(now) / window if window else 0.0
        return share if share < PREFILL_SHARE_MAX else PREFILL_SHARE_MAX

    def _recent(self, now: float) -> float:
        if now == self.recent_at:
            return self.recent_prefill
        window = PREFILL_WINDOW * self.pool.mean_s
        return self.recent_prefill * math.exp(-(now - self.recent_at) / window) if window else 0.0

    @property
    def balanced(self) -> bool:
        """Whether it has at most about its share of the pool's work."""
        return self.reserved * len(self.pool.engines) <= IMBALANCE * self.pool.reserved and not self.foreign


@dataclass(slots=True, eq=False)
class EnginePool:
    """Engines of one device class. Each runs `max_batch` sequences at once and keeps the KV of `kv_tokens` tokens.

    `of` is the name of the user's pool, which can have engines of several classes, and so several of these. The ratio
    of measured to predicted times is averaged here: a roofline knows neither the engine's overheads nor the host's.
    """

    name: str
    roofline: Roofline = CPU
    max_batch: int = 64
    kv_tokens: int = 1 << 40
    engines: list[EngineState] = field(default_factory=list)
    of: str = ""
    predictor: Predictor = field(init=False)
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    mean_s: float = 0.0
    reserved: int = 0
    _next: int = 0

    def __post_init__(self) -> None:
        self.predictor = Predictor(self.roofline)
        self.of = self.of or self.name

    @property
    def ratio(self) -> float:
        """FLOP/s per byte/s: high for devices that suit prefill, low for those that suit decode."""
        return self.roofline.device.tflops / self.roofline.device.bandwidth

    def usable(self, floor: int) -> bool:
        """Whether one of its engines is."""
        for engine in self.engines:  # noqa: SIM110 (called on every turn; a generator costs more than the answer)
            if engine.usable(floor):
                return True
        return False

    def least_loaded(self, floor: int) -> EngineState | None:
        """The usable engine with the least to do; of a large pool, the best of a sample in rotation."""
        engines = self.engines
        if len(engines) > SCAN_ALL_BELOW:
            self._next = (self._next + SCAN_SAMPLE) % len(engines)
            sample = engines[self._next : self._next + SCAN_SAMPLE]
            best = _least_loaded(sample + engines[: SCAN_SAMPLE - len(sample)], floor)
            if best is not None:
                return best
        return _least_loaded(engines, floor)

    def record_prefill(self, predicted: float, actual: float, tokens: int) -> None:
        """Seconds of a prefill of `tokens`: by the roofline, and measured."""
        self.prefill_factor = _towards(self.prefill_factor, actual, predicted, tokens)

    def record_decode(self, predicted: float, actual: float, tokens: int) -> None:
        self.decode_factor = _towards(self.decode_factor, actual, predicted, tokens)

    def expect(self, seconds: float) -> None:
        """A prediction stands in for the mean until something is measured."""
        self.mean_s = self.mean_s or seconds

    def record_request(self, seconds: float) -> None:
        self.mean_s += RATE * (seconds - self.mean_s)


def _least_loaded(engines: list[EngineState], floor: int) -> EngineState | None:
    best, least = None, 0
    for engine in engines:
        if engine.usable(floor):
            load = engine.reserved + engine.foreign_kv
            if best is None or load < least or (load == least and engine.served < best.served):
                best, least = engine, load
    return best


def _towards(factor: float, actual: float, predicted: float, tokens: int) -> float:
    """A geometric moving average; samples of few tokens move it less."""
    if predicted <= 0.0 or actual <= 0.0:
        return factor
    right = min(FACTOR_MAX, max(FACTOR_MIN, actual / predicted))
    return float(factor * (right / factor) ** (RATE * min(1.0, tokens / FULL_WEIGHT_TOKENS)))
