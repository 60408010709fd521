"""A virtual-time event loop: sleeping costs nothing, and the same program gives the same order of events."""

import asyncio
import heapq
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Every coroutine waits and no timer is set: in real time this program would hang for ever."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready; when nothing is, moves the clock to the next timer.

    Timers of the same time fire in the order in which they were set: the heap has every time once, as a bare number,
    and a table has what is due then. Cancelled timers are thrown out once they are the larger part. There is no
    selector in it: a program on virtual time speaks to nobody outside. `handled` counts what it ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._times: list[float] = []
        self._due: dict[float, asyncio.TimerHandle | list[asyncio.TimerHandle]] = {}
        self._timers = 0
        self._cancelled = 0
        self.handled = 0

    def time(self) -> float:
        return self._now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        due = self._due.get(when)
        if due is None:
            self._due[when] = timer
            heapq.heappush(self._times, when)
        elif isinstance(due, list):
            due.append(timer)
        else:
            self._due[when] = [due, timer]
        self._timers += 1
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled += handle._scheduled  # type: ignore[attr-defined] # one that has fired is gone already
        if self._cancelled > 1000 and self._cancelled * 2 > self._timers:
            left = {when: [timer for timer in _listed(due) if not timer.cancelled()] for when, due in self._due.items()}
            self._due = {when: timers[0] if len(timers) == 1 else timers for when, timers in left.items() if timers}
            self._times = list(self._due)
            heapq.heapify(self._times)
            self._timers -= self._cancelled
            self._cancelled = 0

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._move_to_next_timer(ready)
        count = len(ready)
        self.handled += count
        for _ in range(count):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _move_to_next_timer(self, ready: deque[asyncio.Handle]) -> None:
        while not ready:
            if not self._times:
                raise NothingLeft("every coroutine waits and no timer is set")
            self._now = max(self._now, self._times[0])
            while self._times and self._times[0] <= self._now:
                for timer in _listed(self._due.pop(heapq.heappop(self._times))):
                    self._timers -= 1
                    timer._scheduled = False  # type: ignore[attr-defined]
                    if timer.cancelled():
                        self._cancelled -= 1
                    else:
                        ready.append(timer)


def _listed(due: asyncio.TimerHandle | list[asyncio.TimerHandle]) -> list[asyncio.TimerHandle]:
    return due if isinstance(due, list) else [due]


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
