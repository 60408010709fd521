"""How long calls of one kind take, for telling a slow one while it still runs.

The invariants:
- The calls that count are the last that began, whether they have ended or not: of those that ended lately too many
  would be short, of those that run too many long.
- A call that did not come to its end, because it failed, was cancelled or still runs, says only that it would have
  taken longer than it has so far; it is neither left out nor taken for its own length. So giving up slow calls does not
  make the others look slow, nor does it make slow ones look rare.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LEAST = 20  # calls that must have come to their end before anything is known
SHORT = 0.05  # of the quantile: if so many calls more do not end, the longest that did has to do
WINDOW = 1000
REFRESH_S = 0.2


@dataclass(slots=True)
class _Call:
    began: float
    seconds: float | None = None  # None while it runs
    finished: bool = False


class Latencies:
    """`at` is the quantile after which a call is slow."""

    def __init__(self, at: float = 0.95) -> None:
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
    """By Kaplan and Meier: what share of those that took at least so long ended just then, again and again."""
    order = sorted(calls)
    if sum(finished for _, finished in order) < LEAST:
        return None
    left, longest = 1.0, 0.0
    for number, (seconds, finished) in enumerate(order):
        if finished:
            left *= 1 - 1 / (len(order) - number)
            longest = seconds
            if left <= 1 - at + 1e-9:
                return seconds
    return longest if left <= 1 - at + SHORT else None
