"""How well environments and rewards did their work: how long it took, and what had to be done twice or was lost."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from rollart.core import events as ev
from rollart.observe.snapshot import DurationQuantiles, EnvironmentSummary, RewardSummary

FINE = 1.02  # each bucket is so many times as wide as the one before: quantiles are within 1%
LEAST_S = 1e-5


class Spread:
    """Quantiles of any number of durations, in constant memory.

    >>> spread = Spread()
    >>> for seconds in range(1, 1001):
    ...     spread.add(seconds)
    >>> round(spread.at(0.5), -1), round(spread.at(0.99), -1)
    (500.0, 990.0)
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0

    def add(self, seconds: float) -> None:
        self._buckets[round(math.log(max(seconds, LEAST_S), FINE))] += 1
        self.count += 1

    def at(self, share: float) -> float:
        """The middle of the bucket that the quantile is in; 0 if there is nothing."""
        before = 0
        for bucket, count in sorted(self._buckets.items()):
            before += count
            if before >= share * self.count:
                return FINE**bucket
        return 0.0

    def times(self) -> DurationQuantiles:
        return DurationQuantiles(self.at(0.5), self.at(0.95), self.at(0.99))


@dataclass(slots=True)
class _Environment:
    resets: Spread = field(default_factory=Spread)
    hedged: int = 0
    won: int = 0
    retried: int = 0
    killed: int = 0
    quarantined: int = 0


class EnvironmentMetrics:
    def __init__(self) -> None:
        self._tasks: defaultdict[str, _Environment] = defaultdict(_Environment)

    def reset(self, event: ev.EnvironmentReset) -> None:
        self._tasks[event.task].resets.add(event.seconds)

    def hedged(self, event: ev.ResetHedged) -> None:
        self._tasks[event.task].hedged += 1
        self._tasks[event.task].won += event.won

    def lost(self, event: ev.EnvironmentLost) -> None:
        self._tasks[event.task].killed += 1
        self._tasks[event.task].retried += event.retried

    def quarantined(self, event: ev.Quarantined) -> None:
        self._tasks[event.task].quarantined += 1

    def snapshot(self) -> tuple[EnvironmentSummary, ...]:
        return tuple(
            EnvironmentSummary(
                task=task,
                resets=one.resets.count,
                reset_s=one.resets.times(),
                hedged=one.hedged,
                won=one.won,
                retried=one.retried,
                killed=one.killed,
                quarantined=one.quarantined,
            )
            for task, one in self._tasks.items()
        )


@dataclass(slots=True)
class _Reward:
    calls: Spread = field(default_factory=Spread)
    cold: int = 0
    hedged: int = 0
    retried: int = 0
    failed: int = 0
    billed_s: float = 0.0


class RewardMetrics:
    def __init__(self) -> None:
        self._functions: defaultdict[tuple[str, str], _Reward] = defaultdict(_Reward)

    def called(self, event: ev.RewardCalled) -> None:
        reward = self._functions[event.function, event.invoker]
        reward.calls.add(event.seconds)
        reward.cold += event.cold
        reward.hedged += event.hedges
        reward.retried += max(0, event.tries - 1)
        reward.failed += event.reason not in ("", ev.CANCELLED)
        reward.billed_s += event.billed_s

    def snapshot(self) -> tuple[RewardSummary, ...]:
        return tuple(
            RewardSummary(
                function=function,
                invoker=invoker,
                calls=one.calls.count,
                call_s=one.calls.times(),
                cold=one.cold,
                hedged=one.hedged,
                retried=one.retried,
                failed=one.failed,
                billed_s=one.billed_s,
            )
            for (function, invoker), one in self._functions.items()
        )
