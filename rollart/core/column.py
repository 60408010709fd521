"""Numbers of one type, end to end in one block of bytes: msgspec carries it in one piece, numpy reads it in place.

numpy is imported only where a column is read: hosts of environments, which have packages of their own, never do.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from numpy.typing import NDArray

Kind = Literal["i4", "f4", "u1"]
CODES: dict[str, str] = {"i4": "i", "f4": "f", "u1": "B"}
SIZES: dict[str, int] = {"i4": 4, "f4": 4, "u1": 1}


class Column(Struct, frozen=True, gc=False, array_like=True):
    """`kind` is numpy's name of the type; the bytes are little-endian.

    >>> len(Column.ints([5, 6, 7])), Column.ints([5, 6, 7]).array.tolist()
    (3, [5, 6, 7])
    """

    kind: Kind
    data: bytes

    @classmethod
    def of(cls, kind: Kind, values: Iterable[float]) -> Column:
        """From Python numbers; a numpy array is cast."""
        cast = getattr(values, "astype", None)
        return cls(kind, array(CODES[kind], values).tobytes() if cast is None else cast(f"<{kind}").tobytes())

    @classmethod
    def ints(cls, values: Iterable[int]) -> Column:
        return cls.of("i4", values)

    @classmethod
    def floats(cls, values: Iterable[float]) -> Column:
        return cls.of("f4", values)

    @classmethod
    def flags(cls, values: Iterable[int]) -> Column:
        return cls.of("u1", values)

    @property
    def array(self) -> NDArray[Any]:
        """A view that cannot be written to."""
        numpy = import_module("numpy")  # not an import statement: packages of rewards would require it
        values: NDArray[Any] = numpy.frombuffer(self.data, f"<{self.kind}")
        return values

    def __len__(self) -> int:
        return len(self.data) // SIZES[self.kind]
