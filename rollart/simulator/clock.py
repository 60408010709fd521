"""A virtual-time event loop: sleeping costs nothing, and the same program gives the same order of events."""

import asyncio
import heapq
from collections import deque
from collections.abc import Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every coroutine waits and no timer is set: in real time this program would hang."""


class Call(asyncio.TimerHandle):
    """A callback, now or at a time. Created by the million, so without the library's debugging aids."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: tuple[Any, ...], loop: "VirtualLoop", context: Any) -> None:
        self._when, self._callback, self._args, self._loop = when, callback, args, loop
        self._context: Context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            if self._scheduled:  # one that has fired is gone already
                self._loop._timer_handle_cancelled(self)
            self._callback = self._args = None  # type: ignore[assignment] # as the library does


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is ready; when nothing is, moves the clock to the next timer.

    Timers of the same time fire in the order in which they were set: the heap has each time once, and a table has the
    callbacks due then. Cancelled timers are removed once they are the majority. No selector is used: a program on
    virtual time has no I/O. `handled` counts the callbacks that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._times: list[float] = []
        self._due: dict[float, list[Call]] = {}
        self._timers = 0
        self._cancelled = 0
        self.handled = 0

    def time(self) -> float:
        return self._now

    def close(self) -> None:
        """Timers that are left keep everything that they would call."""
        super().close()
        self._due.clear()
        self._times.clear()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        call = Call(self._now, callback, args, self, context)
        self._ready.append(call)  # type: ignore[attr-defined]
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._set(Call(self._now + delay, callback, args, self, context))

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self._set(Call(when, callback, args, self, context))

    def _set(self, call: Call) -> Call:
        if (due := self._due.get(call._when)) is None:
            due = self._due[call._when] = []
            heapq.heappush(self._times, call._when)
        due.append(call)
        self._timers += 1
        call._scheduled = True
        return call

    def _timer_handle_cancelled(self, handle: Call) -> None:
        self._cancelled += 1
        if self._cancelled > 1000 and self._cancelled * 2 > self._timers:
            left = {when: [call for call in due if not call._cancelled] for when, due in self._due.items()}
            self._due = {when: calls for when, calls in left.items() if calls}
            self._times = list(self._due)
            heapq.heapify(self._times)
            self._timers -= self._cancelled
            self._cancelled = 0

    def _run_once(self) -> None:
        """Runs until the loop is stopped: returning after each iteration would cost more than most of them."""
        ready: deque[Call] = self._ready  # type: ignore[attr-defined]
        while True:
            if not ready:
                self._move_to_next_timer(ready)
            count = len(ready)
            self.handled += count
            for _ in range(count):
                call = ready.popleft()
                if call._cancelled:
                    continue
                try:
                    call._context.run(call._callback, *call._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"exception in {call}", "exception": error, "handle": call})
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _move_to_next_timer(self, ready: deque[Call]) -> None:
        while not ready:
            if not self._times:
                raise Deadlock("every coroutine waits and no timer is set")
            self._now = max(self._now, self._times[0])
            while self._times and self._times[0] <= self._now:
                for call in self._due.pop(heapq.heappop(self._times)):
                    self._timers -= 1
                    call._scheduled = False
                    if call._cancelled:
                        self._cancelled -= 1
                    else:
                        ready.append(call)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
