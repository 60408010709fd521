"""Records what the control plane gets from outside, in order, and runs it again with that.

Invariants: a handle of the event loop belongs to the control plane if `CONTROL` is set in its context; it is not set
while a coroutine of the control plane waits within a service. Handles of the control plane run in the order in which
they were scheduled, so its decisions follow from the number of them that ran before each external event: an answer, a
part of one, a timer that fired, a call from outside, or a new reading of the clock, which stands still within an
iteration of the loop. That is what a tape has.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

from rollart.core.events import AnyEvent
from rollart.simulator.clock import VirtualLoop, _Call

CONTROL: ContextVar[bool] = ContextVar("CONTROL", default=False)


def controlled(work: Callable[[], Any]) -> Any:
    """A call into the control plane from outside."""
    token = CONTROL.set(True)
    try:
        return work()
    finally:
        CONTROL.reset(token)


class Tape:
    """`decisions` are the events and the calls of services that the control plane made."""

    def __init__(self) -> None:
        self.items: list[tuple[Any, ...]] = []
        self.decisions: list[str] = []
        self.calls = self.timers = self.handled = self._last = 0
        self._clock = -1.0

    def tick(self, now: float) -> None:
        if now != self._clock:
            self._clock = now
            self._append("clock", now)

    def external(self, kind: str, *rest: Any) -> None:
        self.tick(asyncio.get_running_loop().time())
        self._append(kind, *rest)

    def _append(self, *item: Any) -> None:
        self.items.append((self.handled - self._last, *item))
        self._last = self.handled

    def emit(self, event: AnyEvent) -> None:
        self.decisions.append(repr(event))

    async def call(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        id = self.calls
        self.calls += 1
        self.decisions.append(name)
        token = CONTROL.set(False)
        try:
            try:
                result = await work()
            finally:
                CONTROL.reset(token)
        except BaseException as error:
            self.external("answer", id, None, error)
            raise
        self.external("answer", id, result, None)
        return result

    async def call_in_parts(
        self, name: str, work: Callable[[Any], Awaitable[Any]], on_part: Callable[[Any], Any]
    ) -> Any:
        id = self.calls

        def record(part: Any) -> Any:
            self.external("part", id, part)
            return controlled(lambda: on_part(part))

        return await self.call(name, lambda: work(record))


class RecordingLoop(asyncio.SelectorEventLoop):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape, self._frozen = tape, round(time.monotonic(), 6)

    def time(self) -> float:
        return self._frozen

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._frozen + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        if not CONTROL.get():
            return super().call_at(when, callback, *args, context=context)
        id = self._tape.timers
        self._tape.timers += 1

        def fire(*args: Any) -> None:
            self._tape.handled -= 1  # it is on the tape itself
            self._tape.external("timer", id)
            callback(*args)

        return super().call_at(when, fire, *args, context=context)

    def _run_once(self) -> None:
        timers, ready = self._scheduled, self._ready  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        wait = max(0.0, timers[0]._when - time.monotonic()) if timers else None
        events = self._selector.select(0 if ready or self._stopping else wait)  # type: ignore[attr-defined]
        self._process_events(events)  # type: ignore[attr-defined]
        self._frozen = round(time.monotonic(), 6)
        while timers and timers[0]._when <= self._frozen:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if handle._context.get(CONTROL):
                self._tape.tick(self._frozen)
                self._tape.handled += 1
            handle._run()

    _timer_cancelled_count: int


class Differs(AssertionError):
    """The replay did something else than the run."""


class _Answer(asyncio.Future[Any]):
    """A cancelled call ends when the tape says so."""

    wanted = False

    def cancel(self, msg: Any | None = None) -> bool:
        self.wanted = True
        return True

    def end(self) -> None:
        super().cancel()


class Playback:
    """In place of a Tape, for the replay. `inbound` are the calls from outside by name; `difference` is the first."""

    def __init__(self, tape: Tape) -> None:
        self.items, self._decisions, self.calls, self.position = tape.items, tape.decisions, 0, 0
        self.open: dict[int, _Answer] = {}
        self.parts: dict[int, Callable[[Any], Any]] = {}
        self.timers: list[_Call] = []
        self.inbound: dict[str, Callable[..., None]] = {}
        self.difference = ""

    def emit(self, event: AnyEvent) -> None:
        self._compare(repr(event))

    def _compare(self, made: str) -> None:
        known = self._decisions[self.position] if self.position < len(self._decisions) else "nothing more"
        if made != known and not self.difference:
            self.difference = f"decision {self.position}: the run had {known}, the replay {made}"
        self.position += 1

    async def call(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        id = self.calls
        self.calls += 1
        self._compare(name)
        answer = self.open[id] = _Answer()
        token = CONTROL.set(False)
        try:
            return await answer
        finally:
            CONTROL.reset(token)

    async def call_in_parts(
        self, name: str, work: Callable[[Any], Awaitable[Any]], on_part: Callable[[Any], Any]
    ) -> Any:
        self.parts[self.calls] = on_part
        return await self.call(name, lambda: work(on_part))


class PlayingLoop(VirtualLoop):
    """Runs a control plane as the tape says. Raises Differs."""

    def __init__(self, tape: Playback) -> None:
        super().__init__()
        self._tape, self._now = tape, tape.items[0][2]

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        call = _Call(when, callback, args, self, context)
        if CONTROL.get():
            self._tape.timers.append(call)
        return call

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        self._step()  # starts the control plane
        for number, (handles, kind, *rest) in enumerate(self._tape.items):
            while handles and not self._stopping:  # type: ignore[attr-defined]
                if not ready:
                    raise Differs(self._tape.difference or f"item {number}: the control plane waits")
                handles -= self._step()
            for handle in self._deliver(number, kind, rest):
                ready.appendleft(handle)
                self._step()
        while ready:
            self._step()
        if not self._stopping:  # type: ignore[attr-defined]
            raise Differs(self._tape.difference or "the control plane goes on after the end of the tape")

    def _step(self) -> int:
        """Returns how many handles of the control plane ran."""
        call = self._ready.popleft()  # type: ignore[attr-defined]
        if call._cancelled:
            return 0
        counts = int(call._context.get(CONTROL, False))
        call._context.run(call._callback, *call._args)
        return counts

    def _deliver(self, number: int, kind: str, rest: list[Any]) -> list[Any]:
        """Returns what the event woke."""
        match kind:
            case "clock":
                self._now = rest[0]
            case "timer":
                timer = self._tape.timers[rest[0]]
                if timer._cancelled:
                    raise Differs(f"item {number}: timer {rest[0]} fired in the run and was cancelled in the replay")
                timer._context.run(timer._callback, *timer._args)
            case "part":
                controlled(lambda: self._tape.parts[rest[0]](rest[1]))
            case "answer":
                return self._answer(number, *rest)
            case _:
                controlled(lambda: self._tape.inbound[kind](*rest))
        return []

    def _answer(self, number: int, id: int, result: Any, error: BaseException | None) -> list[Any]:
        ready = self._ready  # type: ignore[attr-defined]
        answer, before = self._tape.open.pop(id, None), len(ready)
        if answer is None:
            raise Differs(f"item {number}: call {id} was not made in the replay")
        if isinstance(error, asyncio.CancelledError):
            if not answer.wanted:
                raise Differs(f"item {number}: call {id} was cancelled in the run only")
            answer.end()
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)
        return [ready.pop() for _ in range(len(ready) - before)]
