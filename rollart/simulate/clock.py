"""A virtual-time event loop: sleeping costs nothing, and the same program gives the same order of events."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Every coroutine waits and no timer is set: in real time this program would hang for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready; when nothing is, moves the clock to the next timer.

    Timers of the same time fire in the order in which they were set. Cancelled timers are thrown out once they are the
    larger part. There is no selector in it: a program on virtual time speaks to nobody outside.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled = 0

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += 1
        if self._cancelled > 1000 and self._cancelled * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._move_to_next_timer(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _move_to_next_timer(self, ready: deque[asyncio.Handle]) -> None:
        timers = self._timers
        while not ready:
            if not timers:
                raise NothingLeft("every coroutine waits and no timer is set")
            self._now = max(self._now, timers[0][0])
            while timers and timers[0][0] <= self._now:
                timer = heapq.heappop(timers)[2]
                timer._scheduled = False  # type: ignore[attr-defined]
                if timer.cancelled():
                    self._cancelled -= 1
                else:
                    ready.append(timer)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
