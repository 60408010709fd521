"""Run-length encoded integer sequences: equal numbers in a row are stored once.

A simulated answer of ten thousand tokens has no token values, only their number and the versions that sampled them. The
control plane handles such sequences in place of lists; the helpers here accept both.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import TypeVar

from msgspec import Struct

T = TypeVar("T")


class RunLength(Struct, frozen=True, gc=False):
    """`spans` are pairs of a value and its count; `length` is the total.

    >>> list(RunLength.of(7, 2) + RunLength.of(8, 1)), len(RunLength.of(7, 3) + RunLength.of(7, 4))
    ([7, 7, 8], 7)
    """

    spans: tuple[tuple[int, int], ...]
    length: int

    @classmethod
    def of(cls, value: int, count: int) -> "RunLength":
        return cls(((value, count),), count)

    def __len__(self) -> int:
        return self.length

    def __bool__(self) -> bool:
        return self.length > 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(repeat(value, count) for value, count in self.spans)

    def __getitem__(self, index: int | slice) -> "int | RunLength":
        if isinstance(index, slice):
            if index != slice(None):
                raise TypeError("a run-length sequence has no slices but [:]")
            return self
        if index == -1:
            return self.spans[-1][0]
        return list(self)[index]

    def __add__(self, other: "RunLength") -> "RunLength":
        mine, more = self.spans, other.spans
        if mine and more and mine[-1][0] == more[0][0]:
            last = (more[0][0], mine[-1][1] + more[0][1])
            return RunLength((*mine[:-1], last, *more[1:]), self.length + other.length)
        return RunLength(mine + more, self.length + other.length)

    @property
    def lowest(self) -> int:
        return min(value for value, _ in self.spans)


@lru_cache(maxsize=1 << 16)
def run_of(value: int, count: int) -> RunLength:
    """Cached: short runs occur again and again."""
    return RunLength.of(value, count)


def lowest(values: "Sequence[int] | RunLength") -> int:
    """The minimum. Raises ValueError if there is none."""
    return values.lowest if isinstance(values, RunLength) else min(values)


def frozen(values: Sequence[T]) -> tuple[T, ...]:
    """An immutable copy: a list as a tuple; a run-length sequence is immutable already."""
    return tuple(values) if isinstance(values, list) else values  # type: ignore[return-value]


def fingerprint(values: Sequence[int]) -> int:
    """A hash of the content."""
    return hash(tuple(values)) if isinstance(values, list) else hash(values)


def joined(context: list[int], more: list[int]) -> list[int]:
    """`context` followed by `more`. A list grows in place."""
    if isinstance(more, list):
        context += more
        return context
    return context + more if context else more
