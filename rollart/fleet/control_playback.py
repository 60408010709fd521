"""A tape of the control plane as event loop and services: it delivers what was recorded and compares decisions."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from rollart.core.events import AnyEvent
from rollart.fleet.control_tape import (
    CONTROL,
    ERRORS,
    ControlTape,
    Inbound,
    controlled,
    decision,
    number_tasks,
    outside,
)
from rollart.simulator.clock import Call, VirtualLoop

T = TypeVar("T")
Raw = msgspec.Raw

_SHOWN = 200  # characters of a decision
_CLEANUP_HANDLES = 100_000


class _Differs(Exception):
    """The replay did something else than the run."""


class _Answer(asyncio.Future[Any]):
    """A cancelled call ends when the tape says so."""

    wanted = False

    def cancel(self, msg: Any | None = None) -> bool:
        self.wanted = True
        return True

    def end(self) -> None:
        super().cancel()


@dataclass(slots=True)
class _Open:
    """A call that the tape has not answered yet."""

    answer: _Answer
    returns: Any
    part: Any = None
    on_part: Callable[[Any], Any] | None = None
    calls: dict[str, tuple[Any, Callable[[Any], Any]]] | None = None


class Playback(ControlTape):
    """Stands in for a Tape. `items` are the external events, `decided` the decisions of the run. A tape that a kill
    cut off has no `end`: the replay may decide more than is on it."""

    def __init__(self, lines: Iterator[bytes]) -> None:
        self.items: list[tuple[int, str, list[Raw]]] = []
        self.decided: list[bytes] = []
        self._at_once: dict[int, tuple[str, list[Raw]]] = {}
        self._values: list[tuple[str, list[Raw]]] = []
        for line in lines:
            self._load(line)
        self.whole = bool(self.items) and self.items[-1][1] == "end"
        self.calls = self.position = self._value = 0
        self.open: dict[int, _Open] = {}
        self.timers: list[Call] = []
        self.difference, self.over = "", False

    def _load(self, line: bytes) -> None:
        if not line.startswith(b"["):
            self.decided.append(line)
            return
        handles, kind, *rest = msgspec.json.decode(line, type=list[Raw])
        name = msgspec.json.decode(kind, type=str)
        if name in ("value", "value raised"):
            self._values.append((name, rest))
        elif name in ("answer", "raised") and rest[1] == b"true":
            self._at_once[msgspec.json.decode(rest[0], type=int)] = (name, rest[2:])
        self.items.append((msgspec.json.decode(handles, type=int), name, rest))

    def emit(self, event: AnyEvent) -> None:
        if CONTROL.get():
            self._compare(decision(event))

    def _compare(self, made: bytes) -> None:
        if self.difference or self.over:
            return
        if self.position < len(self.decided):
            if not _same(made, known := self.decided[self.position]):
                self.difference = f"decision {self.position}: the run had {_shown(known)}, the replay {_shown(made)}"
        elif self.whole:
            self.difference = f"decision {self.position}: the run had no more, the replay {_shown(made)}"
        self.position += 1

    @property
    def compared(self) -> int:
        """Decisions; the replay of a tape that was cut off goes on for a while."""
        return min(self.position, len(self.decided))

    def missing(self, number: int, why: str) -> str:
        """A sentence about a replay that cannot go on at external event `number`."""
        expected = _shown(self.decided[self.position]) if self.position < len(self.decided) else "no more"
        return f"decision {self.position}: the run had {expected}, the replay none; at external event {number}, {why}"

    async def call(self, name: str, returns: Any, work: Callable[[], Awaitable[T]]) -> T:
        result: T = await self._call(name, _Open(_Answer(), returns))
        return result

    async def _call(self, name: str, call: _Open) -> Any:
        if self.over:
            raise asyncio.CancelledError
        id = self.calls
        self.calls += 1
        self._compare(msgspec.json.encode(name))
        if (known := self._at_once.get(id)) is not None:
            return _result(*known, call.returns)
        self.open[id] = call
        token = CONTROL.set(False)
        try:
            return await call.answer
        finally:
            CONTROL.reset(token)

    async def call_in_parts(
        self,
        name: str,
        returns: Any,
        part: Any,
        work: Callable[[Callable[[Any], Any]], Awaitable[T]],
        on_part: Callable[[Any], Any],
    ) -> T:
        result: T = await self._call(name, _Open(_Answer(), returns, part, on_part))
        return result

    def value(self, returns: Any, work: Callable[[], T]) -> T:
        if self.over or self._value == len(self._values):
            raise asyncio.CancelledError
        self._value += 1
        result: T = _result(*self._values[self._value - 1], returns)
        return result

    async def serve(
        self,
        name: str,
        returns: Any,
        calls: dict[str, tuple[Any, Callable[[Any], Any]]],
        work: Callable[[Inbound], Awaitable[T]],
    ) -> T:
        result: T = await self._call(name, _Open(_Answer(), returns, calls=calls))
        return result


def _result(kind: str, rest: list[Raw], returns: Any) -> Any:
    if kind in ("raised", "value raised"):
        raise _error(rest)
    return msgspec.json.decode(rest[0], type=returns)


def _error(rest: list[Raw]) -> BaseException:
    name, text = (msgspec.json.decode(part, type=str) for part in rest)
    return ERRORS[name](text)


def _same(made: bytes, known: bytes) -> bool:
    """An event may have got fields since it was recorded."""
    if made == known or not (made.startswith(b"{") and known.startswith(b"{")):
        return made == known
    now, then = (msgspec.json.decode(line, type=dict[str, Any]) for line in (made, known))
    return all(name in now and now[name] == value for name, value in then.items())


def _shown(line: bytes) -> str:
    text = line.decode()
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


class PlayingLoop(VirtualLoop):
    """Runs a control plane as the tape says. `inbound` are the calls from outside by name, with the types of their
    arguments."""

    def __init__(self, tape: Playback, inbound: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]]) -> None:
        super().__init__()
        self._tape, self._inbound = tape, inbound
        self._asked: dict[int, asyncio.Task[Any]] = {}
        self._deliveries: dict[str, Callable[..., Any]] = {
            "clock": self._tick,
            "timer": self._fire,
            "part": self._part,
            "answer": self._answer,
            "raised": self._answer,
            "notify": self._notify,
            "ask": self._ask,
            "unask": self._unask,
            "value": lambda *rest: None,  # taken when it was read
            "value raised": lambda *rest: None,
            "end": lambda *rest: None,
        }
        number_tasks(self)

    def play(self) -> str:
        """Returns the first difference, if there is one."""
        self.run_forever()
        return self._tape.difference

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:  # type: ignore[override]
        call = Call(when, callback, args, self, context)
        if CONTROL.get():
            self._tape.timers.append(call)
        return call

    def _run_once(self) -> None:
        tape = self._tape
        try:
            self._play_all()
        except _Differs as differs:
            tape.difference = tape.difference or str(differs)
        if tape.position < len(tape.decided) and not tape.difference:
            tape.difference = tape.missing(len(tape.items), "the tape ends")
        tape.over = True
        self._clean_up()
        self.stop()

    def _play_all(self) -> None:
        tape, ready = self._tape, self._ready  # type: ignore[attr-defined]
        for number, (handles, kind, rest) in enumerate(tape.items):
            while handles:
                if not ready:
                    raise _Differs(tape.missing(number, "its control plane waits"))
                handles -= self._step()
                if tape.difference:
                    return
            self._deliver(number, kind, rest)
            if tape.difference:
                return
        while ready and not tape.difference:
            self._step()

    def _step(self) -> int:
        """Returns how many handles of the control plane ran."""
        call = self._ready.popleft()  # type: ignore[attr-defined]
        if call._cancelled:
            return 0
        counts = int(call._context.get(CONTROL, False))
        call._context.run(call._callback, *call._args)
        return counts

    def _deliver(self, number: int, kind: str, rest: list[Raw]) -> None:
        if (deliver := self._deliveries.get(kind)) is not None:
            deliver(number, kind, rest)
            return
        types, call = self._inbound[kind]
        arguments = [msgspec.json.decode(part, type=type) for part, type in zip(rest, types, strict=True)]
        controlled(lambda: call(*arguments))

    def _tick(self, number: int, kind: str, rest: list[Raw]) -> None:
        self._now = msgspec.json.decode(rest[0], type=float)

    def _fire(self, number: int, kind: str, rest: list[Raw]) -> None:
        id = msgspec.json.decode(rest[0], type=int)
        timer = self._tape.timers[id] if id < len(self._tape.timers) else None
        if timer is None or timer._cancelled:
            raise _Differs(self._tape.missing(number, f"timer {id} fired, which it did not set, or cancelled"))
        timer._context.run(timer._callback, *timer._args)

    def _opened(self, number: int, rest: list[Raw]) -> tuple[int, _Open]:
        id = msgspec.json.decode(rest[0], type=int)
        if (call := self._tape.open.get(id)) is None:
            raise _Differs(self._tape.missing(number, f"call {id} was answered, which it did not make"))
        return id, call

    def _part(self, number: int, kind: str, rest: list[Raw]) -> None:
        _, call = self._opened(number, rest)
        assert call.on_part is not None
        part, on_part = msgspec.json.decode(rest[1], type=call.part), call.on_part
        controlled(lambda: on_part(part))

    def _answer(self, number: int, kind: str, rest: list[Raw]) -> None:
        if rest[1] == b"true":
            return  # taken when it was made
        id, call = self._opened(number, rest)
        del self._tape.open[id]
        ready = self._ready  # type: ignore[attr-defined]
        before, answer = len(ready), call.answer
        if kind == "answer":
            answer.set_result(msgspec.json.decode(rest[2], type=call.returns))
        elif not isinstance(error := _error(rest[2:]), asyncio.CancelledError):
            answer.set_exception(error)
        elif answer.wanted:
            answer.end()
        else:
            raise _Differs(self._tape.missing(number, f"call {id} was cancelled in the run only"))
        for handle in [ready.pop() for _ in range(len(ready) - before)]:
            ready.appendleft(handle)
            self._step()

    def _notify(self, number: int, kind: str, rest: list[Raw]) -> None:
        call, argument = self._called(number, rest[0], rest[1], rest[2])
        controlled(lambda: call(argument))

    def _ask(self, number: int, kind: str, rest: list[Raw]) -> None:
        call, argument = self._called(number, rest[0], rest[1], rest[3])
        id = msgspec.json.decode(rest[2], type=int)
        self._asked[id] = task = controlled(lambda: self.create_task(call(argument)))
        outside(lambda: task.add_done_callback(lambda done: done.cancelled() or done.exception()))

    def _called(self, number: int, id: Raw, name: Raw, argument: Raw) -> tuple[Callable[[Any], Any], Any]:
        _, opened = self._opened(number, [id])
        assert opened.calls is not None
        type, call = opened.calls[msgspec.json.decode(name, type=str)]
        return call, msgspec.json.decode(argument, type=type)

    def _unask(self, number: int, kind: str, rest: list[Raw]) -> None:
        controlled(self._asked[msgspec.json.decode(rest[0], type=int)].cancel)

    def _clean_up(self) -> None:
        """End what the tape left open."""
        ready = self._ready  # type: ignore[attr-defined]
        for call in self._tape.open.values():
            call.answer.end()
        for task in asyncio.all_tasks(self):
            task.cancel()
        for _ in range(_CLEANUP_HANDLES):
            if not ready:
                return
            self._step()
