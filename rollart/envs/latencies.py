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
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
            lengths = ((now - call.began if call.seconds is None else call.seconds, call) for call in self._calls)
            self._slow_after = quantile(((seconds, call.finished) for seconds, call in lengths), self._at)
        return self._slow_after


def quantile(calls: Iterable[tuple[float, bool]], at: float) -> float | None:
    """The length that a share `at` of the ordinary calls do not exceed."""
    order = sorted(calls)
    ends = [seconds for seconds, finished in order if finished]
    if len(ends) < MIN_CALLS:
        return None
    curve = survival(order)
    far = OUTLIER_FACTOR * ends[len(ends) // 2]
    beyond = min((left for seconds, left in curve if seconds <= far), default=1.0)
    outliers = min(beyond, MAX_OUTLIERS)
    enough = outliers + (1 - at) * (1 - outliers) + 1e-9
    return next((seconds for seconds, left in curve if left <= enough), None)


def survival(order: Sequence[tuple[float, bool]]) -> list[tuple[float, float]]:
    """The Kaplan-Meier estimator: at each end of a call, shortest first, the share of calls that take longer."""
    left, curve = 1.0, []
    for number, (seconds, finished) in enumerate(order):
        if finished:
            left *= 1 - 1 / (len(order) - number)
            curve.append((seconds, left))
    return curve
