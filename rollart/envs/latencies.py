"""How long calls of one kind take, to recognize a slow one while it still runs.

The invariants:
- The calls that count are the last that began, whether they have ended or not: of those that ended lately too many
  would be short, of those that run too many long.
- A call that did not finish, because it failed, was cancelled or still runs, is censored: it only shows that it would
  have taken longer than so far; it is neither left out nor counted with that length. So giving up slow calls makes
  neither the others look slow nor slow ones look rare.
- The quantile is of the ordinary calls. The few that hang, or fall into a second mode far beyond the first, are
  outliers: counted in, each of them would let another slow call pass for an ordinary one.
"""

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MIN_CALLS = 20  # calls that must have finished before there is an estimate
OUTLIER_FACTOR = 4.0  # times the median; a call that takes longer, or never ends, is an outlier
MAX_OUTLIERS = 0.05  # of all calls; while more have not ended, there is no estimate
WINDOW = 1000
REFRESH_S = 0.2


@dataclass(slots=True)
class _Call:
    began: float
    seconds: float | None = None  # None while it runs
    finished: bool = False


class Latencies:
    """`at` is the quantile of the ordinary calls after which a call is slow."""

    def __init__(self, at: float) -> None:
        self._at = at
        self._calls: deque[_Call] = deque(maxlen=WINDOW)
        self._slow_after: float | None = None
        self._estimated_at = float("-inf")

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """One call."""
        call = _Call(self._now())
        self._calls.append(call)
        try:
            yield
            call.finished = True
        finally:
            call.seconds = self._now() - call.began

    @property
    def slow_after(self) -> float | None:
        """Seconds that ordinary calls rarely exceed; None while there is no estimate."""
        now = self._now()
        if now - self._estimated_at >= REFRESH_S:
            self._estimated_at = now
            calls = [
                (now - call.began if (seconds := call.seconds) is None else seconds, call.finished)
                for call in self._calls
            ]
            self._slow_after = quantile(calls, self._at)
        return self._slow_after


def quantile(calls: Sequence[tuple[float, bool]], at: float) -> float | None:
    """The length that a share `at` of the ordinary calls do not exceed. Each call has its length, and whether it
    finished."""
    ends = sorted([seconds for seconds, finished in calls if finished])
    if len(ends) < MIN_CALLS:
        return None
    left = survival(ends, sorted([seconds for seconds, finished in calls if not finished]))
    ordinary = bisect_right(ends, OUTLIER_FACTOR * ends[len(ends) // 2])
    outliers = min(left[ordinary - 1], MAX_OUTLIERS)
    enough = outliers + (1 - at) * (1 - outliers) + 1e-9
    return next((seconds for seconds, share in zip(ends, left, strict=True) if share <= enough), None)


def survival(ends: Sequence[float], censored: Sequence[float]) -> list[float]:
    """The Kaplan-Meier estimator: at each end of a call, shortest first, the share of calls that take longer. Both are
    sorted."""
    left, shares, at_risk, gone, last = 1.0, [], len(ends) + len(censored), 0, len(censored)
    for seconds in ends:
        while gone < last and censored[gone] <= seconds:
            gone += 1
            at_risk -= 1
        left *= 1 - 1 / at_risk
        at_risk -= 1
        shares.append(left)
    return shares
