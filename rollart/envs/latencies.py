"""How long calls of one kind take, for telling a slow one while it still runs.

The invariants:
- The calls that count are the last that began, whether they have ended or not: of those that ended lately too many
  would be short, of those that run too many long.
- A call that did not come to its end, because it failed, was cancelled or still runs, says only that it would have
  taken longer than it has so far; it is neither left out nor taken for its own length. So giving up slow calls does not
  make the others look slow, nor does it make slow ones look rare.
- The quantile is of the ordinary calls. A few that hang, or fall into a second mode far beyond the first, are what it
  is there to tell apart: counted in, each of them would let another slow call pass for an ordinary one.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

LEAST = 20  # calls that must have come to their end before anything is known
FAR = 4.0  # times the median; what takes longer, or never ends, is no ordinary call
MOST = 0.05  # of all calls that are taken for such; while more have not ended, nothing is known
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
        self._looked = float("-inf")

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
        """Seconds that most calls do not take, or None as long as that is not known."""
        now = self._now()
        if now - self._looked >= REFRESH_S:
            self._looked = now
            lengths = ((now - call.began if call.seconds is None else call.seconds, call) for call in self._calls)
            self._slow_after = quantile(((seconds, call.finished) for seconds, call in lengths), self._at)
        return self._slow_after


def quantile(calls: Iterable[tuple[float, bool]], at: float) -> float | None:
    """The length that a share `at` of the ordinary calls do not exceed."""
    order = sorted(calls)
    ends = [seconds for seconds, finished in order if finished]
    if len(ends) < LEAST:
        return None
    curve = survival(order)
    far = FAR * ends[len(ends) // 2]
    beyond = min((left for seconds, left in curve if seconds <= far), default=1.0)
    unusual = min(beyond, MOST)
    enough = unusual + (1 - at) * (1 - unusual) + 1e-9
    return next((seconds for seconds, left in curve if left <= enough), None)


def survival(order: Sequence[tuple[float, bool]]) -> list[tuple[float, float]]:
    """By Kaplan and Meier: at each end of a call, shortest first, what share of all takes longer than that."""
    left, curve = 1.0, []
    for number, (seconds, finished) in enumerate(order):
        if finished:
            left *= 1 - 1 / (len(order) - number)
            curve.append((seconds, left))
    return curve
