"""Examples of the warmup: a file that is written once and mapped into memory, and the batches drawn from it.

Its folder has three flat arrays: `tokens` (uint32), `mask` (uint8) and `ends` (uint64), the positions after each.
"""

import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import cos, pi
from pathlib import Path
from typing import overload

import numpy as np

from rollart.config import WarmupConfig
from rollart.core.types import Example, ExampleBatch

TokensAndMask = tuple[Sequence[int], Sequence[int]]


def write_examples(folder: Path, examples: Iterable[TokensAndMask]) -> int:
    """Write all of them to a folder that exists, and return their number."""
    ends = array("Q")
    with open(folder / "tokens", "wb") as all_tokens, open(folder / "mask", "wb") as masks:
        for tokens, mask in examples:
            array("I", tokens).tofile(all_tokens)
            array("B", mask).tofile(masks)
            ends.append((ends[-1] if ends else 0) + len(tokens))
    (folder / "ends").write_bytes(ends.tobytes())
    return len(ends)


class StoredExamples(Sequence[Example]):
    """Only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self._tokens, self._mask, self._ends = (
            np.memmap(folder / name, dtype=np.dtype(kind), mode="r")
            for name, kind in (("tokens", "I"), ("mask", "B"), ("ends", "Q"))
        )

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        part = slice(int(self._ends[index - 1]) if index else 0, int(self._ends[index]))
        return Example(self._tokens[part].tolist(), self._mask[part].tolist())


def batches(examples: Sequence[Example], config: WarmupConfig, seed: int, first: int = 0) -> Iterator[ExampleBatch]:
    """The batches of all steps from `first` on; those of a step are the same whichever is the first."""
    order = islice(shuffled(len(examples), config.batch, seed), first, config.steps)
    for step, chosen in enumerate(order, first):
        rate = config.lr * schedule(step, config.steps)
        yield ExampleBatch(step, rate, tuple(examples[index] for index in chosen))


def schedule(step: int, steps: int) -> float:
    """The share of the learning rate: a linear rise over the first twentieth, then half a cosine down to a tenth."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + cos(pi * (step - rise) / max(1, steps - rise)))


def shuffled(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Endless: every example once per round, in an order drawn from `seed`."""
    draw = random.Random(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting += draw.sample(range(count), count)
        yield waiting[:size]
        del waiting[:size]
