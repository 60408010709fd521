"""Which share of each task every pool should serve, so that all pools are busy with what they are good at.

A single request cannot know what will come next: an idle device that is poor at a kind of work looks tempting a moment
before the work arrives that it is good at. So the split is planned from averages: the tokens that requests of a task
have had to prefill and to decode, what that costs on each device class, and how many such requests there are. The plan
is made anew now and then, from averages that follow a task that changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollart.hardware.balance import balanced
from rollart.rollout.engine_state import EnginePool

RATE = 0.1
WEIGHT_RATE = 0.01
EVERY, SELDOM = 16, 256  # requests between two plans: at first, and when more is known
TYPICAL_BATCH = 16
WORTH = 0.65  # of its largest share; a task had better keep out of a pool where it would have less


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
        self._known: list[str] = []
        self._count, self._until = 0, EVERY

    def of(self, task: str, pools: Sequence[EnginePool], floor: int) -> dict[str, float]:
        """Shares by name of the pools that the task should use, of those that have an engine for it now."""
        able = [pool.name for pool in pools if pool.usable(floor)]
        if able != self._known or task not in self._plan or self._count >= self._until:
            self._until = min(SELDOM, 2 * self._until)
            self._count, self._known = 0, able
            self._make([pool for pool in pools if pool.name in able], floor)
        return self._plan.get(task, {})

    def saw(self, task: str, new: int, context: int, decoded: float) -> None:
        """A request that has so many tokens to prefill, in such a context, and about so many to decode."""
        self._count += 1
        demand = self._tasks.get(task)
        if demand is None:
            self._tasks[task] = _Demand(new, context, decoded)
            self._until = EVERY
            self._count = EVERY
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

    def _make(self, pools: Sequence[EnginePool], floor: int) -> None:
        engines = {pool.name: sum(place.usable(floor) for place in pool.places) for pool in pools}
        seconds = {
            task: {pool.name: demand.weight * _work(pool, demand) / engines[pool.name] for pool in pools}
            for task, demand in self._tasks.items()
        }
        self._plan = {task: _worth(shares) for task, shares in balanced(seconds).items()} if pools else {}


def _worth(shares: dict[str, float]) -> dict[str, float]:
    least = WORTH * max(shares.values(), default=0.0)
    return {name: share for name, share in shares.items() if share >= least}


def _work(pool: EnginePool, demand: _Demand) -> float:
    """Seconds of one engine that a request takes away from others: its prefill, and its part of the decode steps."""
    model = pool.predictor
    cached = int(max(0.0, demand.context - demand.new))
    batch = max(TYPICAL_BATCH, int(sum(place.usual_open for place in pool.places) / max(1, len(pool.places))))
    step = model.decode(batch, batch * demand.context) / batch
    return model.compute(int(demand.new), cached) + demand.decoded * step
