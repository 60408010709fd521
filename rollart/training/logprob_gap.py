"""How far the engine's logprobs are from the trainer's, summed over tokens in cells that can explain it.

A cell is the tokens of one task and one age (versions between the one that sampled a token and the one that is
trained), split by whether tokens of older weights precede them in their conversation. Everything comes out of the first
forward pass of a step: the gap is engine minus trainer. The slope, the trainer's logprob plus entropy, is the
derivative of a logprob with respect to the logarithm of the inverse temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rollart.core.column import Column
from rollart.core.types import LogprobGap, Sample
from rollart.training.ranks import Ranks


class Cell(NamedTuple):
    """`continued`: the conversation was begun by older weights."""

    task: str
    age: int
    continued: bool


class Cells:
    """Numbers the cells of the batch of one step, in order of appearance."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._numbers: dict[Cell, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def of(self, sample: Sample) -> Column:
        """One number per action token."""
        made = sample.versions.array
        if not len(made):
            return sample.versions
        starts = np.flatnonzero(np.diff(made, prepend=made[0] - 1))  # of runs of tokens of one version
        runs = np.diff(starts, append=len(made))
        cells = [Cell(sample.task, self._step - version, bool(version != made[0])) for version in made[starts].tolist()]
        numbers = [self._numbers.setdefault(cell, len(self._numbers)) for cell in cells]
        return Column.ints(np.repeat(numbers, runs))

    def by_task(self) -> dict[str, list[int]]:
        """The numbers of the cells of each task."""
        found: dict[str, list[int]] = {}
        for cell, number in self._numbers.items():
            found.setdefault(cell.task, []).append(number)
        return found

    def rows(self, totals: "GapTotals") -> list["GapRow"]:
        """One per cell whose sums are finite."""
        rows = []
        for cell, (tokens, size, *products), (highest, deepest) in zip(
            self._numbers, totals.sums.tolist(), totals.peaks.tolist(), strict=True
        ):
            if tokens and isfinite(size):
                rows.append(GapRow(cell, int(tokens), size, max(highest, deepest), -deepest, *products))
        return rows


class GapTotals:
    """Sums and peaks over the tokens of each cell; after `merge`, those of all ranks."""

    def __init__(self, cells: int, device: torch.device | None = None) -> None:
        self.sums = torch.zeros(cells, 5, dtype=torch.float64, device=device)
        self.peaks = torch.full((cells, 2), -torch.inf, dtype=torch.float64, device=device)

    def add(self, cell: Tensor, gap: Tensor, slope: Tensor) -> None:
        gap, slope = gap.double(), slope.double()
        self.sums.index_add_(0, cell, torch.stack([torch.ones_like(gap), gap.abs(), gap * slope, slope**2, gap**2], 1))
        both = torch.stack([gap, -gap], 1)
        self.peaks.scatter_reduce_(0, cell[:, None].expand_as(both), both, "amax")

    def merge(self, ranks: Ranks) -> None:
        self.sums = torch.tensor(ranks.all_reduce(self.sums.flatten().tolist())).view_as(self.sums.cpu())
        peaks = ranks.all_reduce(self.peaks.flatten().tolist(), ReduceOp.MAX)
        self.peaks = torch.tensor(peaks).view_as(self.peaks.cpu())


@dataclass(frozen=True, slots=True)
class GapRow:
    """`size` is the sum of absolute gaps, `peak` the largest, `lowest` the smallest signed one; the last three are sums
    of products."""

    cell: Cell
    tokens: int
    size: float
    peak: float
    lowest: float
    gap_slope: float
    slope_slope: float
    gap_gap: float

    @property
    def mean(self) -> float:
        return self.size / self.tokens

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return sqrt(max(0.0, self.gap_gap / self.tokens - self.mean**2) / self.tokens)


def pool(rows: Sequence[GapRow]) -> GapRow:
    """As one cell, with the name of the first."""
    return GapRow(
        cell=rows[0].cell,
        tokens=sum(row.tokens for row in rows),
        size=sum(row.size for row in rows),
        peak=max(row.peak for row in rows),
        lowest=min(row.lowest for row in rows),
        gap_slope=sum(row.gap_slope for row in rows),
        slope_slope=sum(row.slope_slope for row in rows),
        gap_gap=sum(row.gap_gap for row in rows),
    )


def gap_table(rows: Sequence[GapRow]) -> tuple[LogprobGap, ...]:
    """By task and age, for the step's metrics."""
    cells: dict[tuple[str, int], list[GapRow]] = {}
    for row in rows:
        cells.setdefault((row.cell.task, row.cell.age), []).append(row)
    return tuple(
        LogprobGap(task, age, whole.tokens, whole.mean, whole.peak)
        for (task, age), members in sorted(cells.items())
        for whole in [pool(members)]
    )
