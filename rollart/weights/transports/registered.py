"""Memory that a transport registers with its hardware, once for memory that is reused."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class RegisteredMemory(Generic[T]):
    """An LRU cache of registrations. Memory is kept alive while it is registered, so an address always means the same
    bytes."""

    def __init__(self, register: Callable[[int, int], T], release: Callable[[T], None], keep: int) -> None:
        self._register, self._release, self._keep = register, release, keep
        self._known: OrderedDict[tuple[int, int], tuple[memoryview, T]] = OrderedDict()

    def use(self, data: memoryview) -> int:
        """Registers `data`; returns its address."""
        key = address(data), data.nbytes
        if key not in self._known:
            self._known[key] = data, self._register(*key)
        self._known.move_to_end(key)
        while len(self._known) > self._keep:
            self._release(self._known.popitem(last=False)[1][1])
        return key[0]

    def clear(self) -> None:
        while self._known:
            self._release(self._known.popitem()[1][1])


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
