"""How far the engine's logprobs are from the trainer's, token by token, summed up by what can explain it.

A cell is the tokens of one task and one age (versions between the one that made a token and the one that is trained),
split by whether older tokens of the policy stand before them in their conversation. Everything comes out of the first
forward pass of a step: the gap is engine minus trainer, and beside it the trainer's logprob plus entropy is kept, which
is how a logprob moves with the logarithm of the inverse temperature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from rollart.core.types import LogprobGap, Sample

Merge = Callable[[Sequence[float]], list[float]]


class Cell(NamedTuple):
    """`continued`: the conversation was begun by older weights."""

    task: str
    age: int
    continued: bool


class Cells:
    """Numbers the cells of the batch of one step, in the order in which they are met."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._numbers: dict[Cell, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, sample: Sample) -> list[int]:
        """One number per action token."""
        made = [version for version, bit in zip(sample.versions, sample.mask, strict=True) if bit]
        numbers: list[int] = []
        for version, run in groupby(made):
            cell = Cell(sample.task, self._step - version, version != made[0])
            numbers += [self._numbers.setdefault(cell, len(self._numbers))] * len(list(run))
        return numbers

    def rows(self, totals: "GapTotals") -> list["GapRow"]:
        """One per cell whose numbers are numbers."""
        rows = []
        for cell, (tokens, size, lean, leans, squares), (highest, deepest) in zip(
            self._numbers, totals.sums.tolist(), totals.peaks.tolist(), strict=True
        ):
            if tokens and isfinite(size):
                rows.append(GapRow(cell, int(tokens), size, max(highest, deepest), -deepest, lean, leans, squares))
        return rows


class GapTotals:
    """Sums and peaks over the tokens of each cell. `merge` makes them those of all ranks."""

    def __init__(self, cells: int, device: torch.device | None = None) -> None:
        self.sums = torch.zeros(cells, 5, dtype=torch.float64, device=device)
        self.peaks = torch.full((cells, 2), -torch.inf, dtype=torch.float64, device=device)

    def add(self, cell: Tensor, gap: Tensor, lean: Tensor) -> None:
        gap, lean = gap.double(), lean.double()
        self.sums.index_add_(0, cell, torch.stack([torch.ones_like(gap), gap.abs(), gap * lean, lean**2, gap**2], 1))
        both = torch.stack([gap, -gap], 1)
        self.peaks.scatter_reduce_(0, cell[:, None].expand_as(both), both, "amax")

    def merge(self, sums: Merge, largest: Merge) -> None:
        self.sums = torch.tensor(sums(self.sums.flatten().tolist())).view_as(self.sums.cpu())
        self.peaks = torch.tensor(largest(self.peaks.flatten().tolist())).view_as(self.peaks.cpu())


@dataclass(frozen=True, slots=True)
class GapRow:
    """`size` is the sum of absolute gaps, `peak` the largest, `lowest` the smallest signed one; `lean`, `leans` and
    `squares` are the sums of gap x lean, lean x lean and gap x gap."""

    cell: Cell
    tokens: int
    size: float
    peak: float
    lowest: float
    lean: float
    leans: float
    squares: float

    @property
    def mean(self) -> float:
        return self.size / self.tokens

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return sqrt(max(0.0, self.squares / self.tokens - self.mean**2) / self.tokens)


def pooled(rows: Sequence[GapRow]) -> GapRow:
    """As one cell; its name is that of the first."""
    return GapRow(
        rows[0].cell,
        sum(row.tokens for row in rows),
        sum(row.size for row in rows),
        max(row.peak for row in rows),
        min(row.lowest for row in rows),
        sum(row.lean for row in rows),
        sum(row.leans for row in rows),
        sum(row.squares for row in rows),
    )


def table(rows: Sequence[GapRow]) -> tuple[LogprobGap, ...]:
    """What is reported: by task and age."""
    cells: dict[tuple[str, int], list[GapRow]] = {}
    for row in rows:
        cells.setdefault((row.cell.task, row.cell.age), []).append(row)
    return tuple(
        LogprobGap(task, age, whole.tokens, whole.mean, whole.peak)
        for (task, age), members in sorted(cells.items())
        for whole in [pooled(members)]
    )
