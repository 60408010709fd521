"""Which share of each task every pool should serve, so that all pools are busy with what they are good at.

A single request cannot know what will come next: an idle device that is poor at a kind of work looks tempting a moment
before the work arrives that it is good at. So the split is planned from moving averages: the tokens that requests of a
task prefill and decode, what that costs on each device class, and how many such requests there are. The plan is
recomputed now and then.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.hardware.balance import balanced
from rollart.rollout.engine_state import EnginePool

RATE = 0.1
WEIGHT_RATE = 0.01
INTERVAL_MIN, INTERVAL_MAX = 16, 256  # requests between two plans; doubles up to the second
TYPICAL_BATCH = 16
SHARE_MIN = 0.65  # of its largest share; a task keeps out of pools of a device class where it would have less


@dataclass(slots=True)
class _Demand:
    """Averages of one task's requests: tokens to prefill, of context and to decode. `weight` is its share of all."""

    new: float
    context: float
    decoded: float
    weight: float = 1.0
    sent: dict[str, float] = field(default_factory=dict)


class Shares:
    def __init__(self) -> None:
        self._tasks: dict[str, _Demand] = {}
        self._plan: dict[str, dict[str, float]] = {}
        self._usable: list[str] = []
        self._count, self._interval = 0, INTERVAL_MIN

    def of(self, task: str, pools: Sequence[EnginePool], floor: int) -> dict[str, float]:
        """By pool, of those that have a usable engine now, the share of the task's requests that should go there."""
        usable = [pool.name for pool in pools if pool.usable(floor)]
        if usable != self._usable or task not in self._plan or self._count >= self._interval:
            self._interval = min(INTERVAL_MAX, 2 * self._interval)
            self._count, self._usable = 0, usable
            self._make_plan([pool for pool in pools if pool.name in usable], floor)
        return self._plan.get(task, {})

    def record(self, task: str, new: int, context: int, decoded: float) -> None:
        """A request with `new` of its `context` tokens to prefill, and about `decoded` to decode."""
        self._count += 1
        demand = self._tasks.get(task)
        if demand is None:
            self._tasks[task] = _Demand(new, context, decoded)
            self._count = self._interval = INTERVAL_MIN
            return
        demand.new += RATE * (new - demand.new)
        demand.context += RATE * (context - demand.context)
        demand.decoded += RATE * (decoded - demand.decoded)
        for name, other in self._tasks.items():
            other.weight += WEIGHT_RATE * ((name == task) - other.weight)

    def pick(self, task: str, allowed: dict[str, float]) -> str:
        """The pool that is furthest behind its share of new conversations."""
        sent = self._tasks[task].sent if task in self._tasks else {}
        total = 1.0 + sum(sent.values())
        pool = max(allowed, key=lambda name: allowed[name] * total - sent.get(name, 0.0))
        for name in sent:
            sent[name] *= 1 - RATE
        sent[pool] = sent.get(pool, 0.0) + 1.0
        return pool

    def _make_plan(self, pools: Sequence[EnginePool], floor: int) -> None:
        engines = {pool.name: sum(engine.usable(floor) for engine in pool.engines) for pool in pools}
        seconds = {
            task: {pool.name: demand.weight * _work(pool, demand) / engines[pool.name] for pool in pools}
            for task, demand in self._tasks.items()
        }
        plan = balanced(seconds) if pools else {}
        kinds = {pool.name: (pool.roofline.device.name, pool.roofline.devices) for pool in pools}
        self._plan = {task: _worthwhile(shares, kinds) for task, shares in plan.items()}


def _worthwhile(shares: dict[str, float], kinds: dict[str, tuple[str, int]]) -> dict[str, float]:
    """Without kinds of pools that get little of the task; a pool may get little because it is small."""
    by_kind: defaultdict[tuple[str, int], float] = defaultdict(float)
    for name, share in shares.items():
        by_kind[kinds[name]] += share
    smallest = SHARE_MIN * max(by_kind.values(), default=0.0)
    return {name: share for name, share in shares.items() if share and by_kind[kinds[name]] >= smallest}


def _work(pool: EnginePool, demand: _Demand) -> float:
    """Seconds of one engine that a request takes: its prefill, and its part of the decode steps."""
    model = pool.predictor
    cached = int(max(0.0, demand.context - demand.new))
    batch = max(TYPICAL_BATCH, int(sum(engine.mean_open for engine in pool.engines) / max(1, len(pool.engines))))
    step = model.decode(batch, batch * demand.context) / batch
    return model.prefill(int(demand.new), cached)[0] + demand.decoded * step
