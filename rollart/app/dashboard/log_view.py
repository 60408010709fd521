"""What the views of a log share: which events they read, names that are kept as numbers, and rows of numbers."""

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rollart.core import events as ev

Columns = np.ndarray[Any, Any]
_BLOCK = 1 << 16  # rows


class LogView:
    """Folded from the log, one event after the other. `handlers` says which events it reads; others cost it nothing."""

    def __init__(self, handlers: dict[type[ev.Event], Callable[[Any], None]]) -> None:
        self.handlers = handlers

    def fold(self, event: ev.AnyEvent) -> None:
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(event)


class Names(list[str]):
    """Names by number, in the order in which they were first seen.

    >>> names = Names()
    >>> names.number("a"), names.number("b"), names.number("a")
    (0, 1, 0)
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        known = self._numbers.get(name)
        if known is None:
            known = self._numbers[name] = len(self)
            self.append(name)
        return known


class PackedRows:
    """Rows of numbers in one growing buffer, in the order of the log: a tenth of what objects take.

    >>> rows = PackedRows(where="i4", seconds="f4")
    >>> rows.add(3, 0.5)
    >>> [block["seconds"].tolist() for block in rows.blocks()]
    [[0.5]]
    """

    def __init__(self, **fields: str) -> None:
        dtype = np.dtype(list(fields.items()))
        self._dtype, self._data = dtype, bytearray()
        self._pack = struct.Struct("<" + "".join(dtype[name].char for name in fields)).pack

    def add(self, *values: float) -> None:
        self._data += self._pack(*values)

    def __len__(self) -> int:
        return len(self._data) // self._dtype.itemsize

    def blocks(self) -> Iterator[Columns]:
        """Views, a part at a time: what is computed from one stays small. They must be gone before `add`."""
        for at in range(0, len(self), _BLOCK):
            count = min(_BLOCK, len(self) - at)
            yield np.frombuffer(self._data, dtype=self._dtype, count=count, offset=at * self._dtype.itemsize)
