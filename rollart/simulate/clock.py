"""A virtual-time event loop: sleeping costs nothing, and the same program gives the same order of events."""

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class NothingLeft(RuntimeError):
    """Every coroutine waits and no timer is set: in real time this program would hang for ever."""


class _Skip(selectors.BaseSelector):
    """Instead of waiting for a timer, moves the clock to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingLeft("every coroutine waits and no timer is set")
        if timeout > 0:
            self.now += timeout
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _Timer(asyncio.TimerHandle):
    """Timers of the same time fire in the order in which they were set."""

    __slots__ = ("_number",)

    def __init__(self, number: int, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        super().__init__(when, callback, args, loop, context)
        self._number = number

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        assert isinstance(other, _Timer)
        return (self.when(), self._number) < (other.when(), other._number)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skip = _Skip()
        self._timers = itertools.count()
        super().__init__(self._skip)
        # Two timers closer than this run together; the default of a nanosecond would be lost in float rounding.
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._skip.now

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(next(self._timers), when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
