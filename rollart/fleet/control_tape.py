"""Records what the control plane gets from outside, in order: enough to run it again without any service.

Invariants: a handle of the event loop belongs to the control plane if `CONTROL` is set in its context; it is not set
while a coroutine of the control plane waits within a service, nor in anything that services do. Handles of the control
plane run in the order in which they were scheduled, so its decisions follow from the number of them that ran before
each external event: an answer, a part of one, a timer that fired, a call from outside, or a new reading of the clock,
which stands still within an iteration of the loop. That is what a tape has, beside the decisions themselves: events,
and calls of services.

A tape is a log of JSON lines. A line that is an array is an external event, `[handles since the last one, kind, ...]`;
any other line is a decision.
"""

import asyncio
import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollart.core import errors
from rollart.core.event_log import LineLog, round_durations
from rollart.core.events import AnyEvent, EventSink
from rollart.fleet.supervision import root_cause
from rollart.training.client import TrainerLost

T = TypeVar("T")

CONTROL: ContextVar[bool] = ContextVar("CONTROL", default=False)
FORMAT = 1
_CANCELLED_MIN, _CANCELLED_SHARE = 100, 0.5  # of timers, before they are removed, as asyncio does

# What services may raise, by the name on the tape; anything else is recorded as the nearest of these that it is.
ERRORS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError,
        errors.DiskFull,
        errors.EngineFailed,
        errors.EngineLost,
        errors.EnvironmentFailed,
        errors.RewardFailed,
        errors.RollartError,
        errors.ServiceError,
        errors.ServiceSilent,
        TrainerLost,
        asyncio.CancelledError,
        TimeoutError,
        OSError,
        Exception,
        BaseException,
    )
}


def controlled(work: Callable[[], T]) -> T:
    """A call into the control plane from outside."""
    return _within(True, work)


def outside(work: Callable[[], T]) -> T:
    """A call out of the control plane that gives nothing back."""
    return _within(False, work)


def _within(control: bool, work: Callable[[], T]) -> T:
    token = CONTROL.set(control)
    try:
        return work()
    finally:
        CONTROL.reset(token)


def decision(event: AnyEvent) -> bytes:
    """An event as a line of a tape: as in the event log, before that sets its time."""
    round_durations(event)
    return msgspec.json.encode(event)


class ControlTape(ABC):
    """What stands between the control plane and the services, while a run is recorded and while it is replayed."""

    @abstractmethod
    async def call(self, name: str, returns: Any, work: Callable[[], Awaitable[T]]) -> T:
        """A call of a service; `name` says what is asked of it, `returns` is the type of its answer."""

    @abstractmethod
    async def call_in_parts(
        self,
        name: str,
        returns: Any,
        part: Any,
        work: Callable[[Callable[[Any], Any]], Awaitable[T]],
        on_part: Callable[[Any], Any],
    ) -> T:
        """As `call`, of a service that gives parts of type `part` before the answer."""

    @abstractmethod
    def value(self, returns: Any, work: Callable[[], T]) -> T:
        """What is read from outside at once."""

    @abstractmethod
    async def serve(
        self,
        name: str,
        returns: Any,
        calls: dict[str, tuple[Any, Callable[[Any], Any]]],
        work: Callable[["Inbound"], Awaitable[T]],
    ) -> T:
        """As `call`, of a service that calls the control plane meanwhile: `calls` by name, each with the type of its
        argument. A coroutine function runs as a task of the control plane."""


class Inbound:
    """The calls that one service may make into the control plane while it is recorded."""

    def __init__(self, tape: "Tape", call: int, calls: dict[str, tuple[Any, Callable[[Any], Any]]]) -> None:
        self._tape, self._call, self._calls = tape, call, calls

    def notify(self, name: str, argument: Any) -> None:
        self._tape.external("notify", self._call, name, argument)
        controlled(lambda: self._calls[name][1](argument))

    async def ask(self, name: str, argument: Any, recorded: Any) -> Any:
        """`recorded` is what the tape keeps of the argument."""
        number = self._tape.served
        self._tape.served += 1
        self._tape.external("ask", self._call, name, number, recorded)
        return await self._tape.run(lambda: self._calls[name][1](argument), "unask", number)


class Tape(ControlTape):
    """Writes to the folder `path`. `turn` counts the handles of the loop, whoever they belong to: an answer within the
    same one is there at once."""

    def __init__(self, path: Path) -> None:
        self._log = LineLog(path)
        self._encode = msgspec.json.Encoder().encode
        self.calls = self.timers = self.served = self.handled = self.turn = self._last = 0
        self._clock = -1.0

    def close(self) -> None:
        self._log.close()

    def tick(self, now: float) -> None:
        if now != self._clock:
            self._clock = now
            self._append("clock", now)

    def external(self, kind: str, *rest: Any) -> None:
        self.tick(asyncio.get_running_loop().time())
        self._append(kind, *rest)

    def _append(self, *item: Any) -> None:
        self._log.append(self._encode((self.handled - self._last, *item)))
        self._last = self.handled

    def decide(self, line: bytes) -> None:
        self._log.append(line)

    def sink(self, log: EventSink) -> EventSink:
        return _TapedSink(self, log)

    async def call(self, name: str, returns: Any, work: Callable[[], Awaitable[T]]) -> T:
        id = self.calls
        self.calls += 1
        self._log.append(self._encode(name))
        turn, token = self.turn, CONTROL.set(False)
        try:
            try:
                result = await work()
            finally:
                CONTROL.reset(token)
        except BaseException as error:
            self.external("raised", id, turn == self.turn, *_error(error))
            raise
        self.external("answer", id, turn == self.turn, result)
        return result

    async def call_in_parts(
        self,
        name: str,
        returns: Any,
        part: Any,
        work: Callable[[Callable[[Any], Any]], Awaitable[T]],
        on_part: Callable[[Any], Any],
    ) -> T:
        id = self.calls

        def record(part: Any) -> Any:
            self.external("part", id, part)
            return controlled(lambda: on_part(part))

        return await self.call(name, returns, lambda: work(record))

    def value(self, returns: Any, work: Callable[[], T]) -> T:
        try:
            result = outside(work)
        except BaseException as error:
            self._append("value raised", *_error(error))
            raise
        self._append("value", result)
        return result

    async def serve(
        self,
        name: str,
        returns: Any,
        calls: dict[str, tuple[Any, Callable[[Any], Any]]],
        work: Callable[[Inbound], Awaitable[T]],
    ) -> T:
        inbound = Inbound(self, self.calls, calls)
        return await self.call(name, returns, lambda: work(inbound))

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]], end: str, *rest: Any) -> T:
        """A coroutine of the control plane, for someone outside; `end` is on the tape if that one is cancelled."""
        task = controlled(lambda: asyncio.get_running_loop().create_task(work()))
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                cancelled = True
                self.external(end, *rest)
                controlled(task.cancel)
        if cancelled and task.cancelled():
            raise asyncio.CancelledError
        return task.result()


class _TapedSink:
    def __init__(self, tape: Tape, log: EventSink) -> None:
        self._tape, self._log = tape, log

    def emit(self, event: AnyEvent) -> None:
        if CONTROL.get():
            self._tape.decide(decision(event))
        outside(lambda: self._log.emit(event))


def _error(error: BaseException) -> tuple[str, str]:
    error = root_cause(error)
    name = next(kind.__name__ for kind in type(error).__mro__ if ERRORS.get(kind.__name__) is kind)
    return name, str(error)


class NumberedTask(asyncio.Task[Any]):
    """Sets of tasks, as those of task groups, have the same order again when they are replayed."""

    def __init__(self, number: int, coroutine: Any, **options: Any) -> None:
        self._number_of_task = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number_of_task


def number_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Those of the control plane count; the others have a hash of their own."""
    count = 0

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        nonlocal count
        if not CONTROL.get():
            return asyncio.Task(coroutine, loop=loop, **options)
        count += 1
        return NumberedTask(count, coroutine, loop=loop, **options)

    loop.set_task_factory(make)


class RecordingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still within an iteration. Records nothing until it has a `tape`."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self._frozen = round(time.monotonic(), 6)
        number_tasks(self)

    def time(self) -> float:
        return self._frozen

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        tape = self.tape
        if tape is None or not CONTROL.get():
            return super().call_at(when, callback, *args, context=context)
        id = tape.timers
        tape.timers += 1

        def fire(*args: Any) -> None:
            tape.handled -= 1  # it is on the tape itself
            tape.external("timer", id)
            callback(*args)

        return super().call_at(when, fire, *args, context=context)

    def _run_once(self) -> None:
        """As asyncio's, but for the clock and the count of handles."""
        ready = self._ready  # type: ignore[attr-defined]
        timers = self._live_timers()
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
            if (tape := self.tape) is not None:
                tape.turn += 1
                if handle._context.get(CONTROL):
                    tape.tick(self._frozen)
                    tape.handled += 1
            handle._run()

    def _live_timers(self) -> list[Any]:
        """The heap of timers, the first of which was not cancelled."""
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        if len(timers) > _CANCELLED_MIN and self._timer_cancelled_count > _CANCELLED_SHARE * len(timers):
            for timer in timers:
                timer._scheduled = not timer._cancelled
            timers[:] = [timer for timer in timers if timer._scheduled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False
        return timers

    _timer_cancelled_count: int
