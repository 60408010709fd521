"""KV of the running sequences: dense rows, one tensor per layer for keys and one for values.

Row r of every tensor belongs to the r-th running sequence. Rows and positions grow by doubling while that is cheap,
and to the exact need when memory is short; resizing goes tensor by tensor, so the peak is one tensor above the size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """What one token costs: `tensors` (keys and values of each layer) of `heads` x `dim` numbers."""

    tensors: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return self.tensors * self.heads * self.dim * self.dtype.itemsize


class Rows:
    def __init__(self, layout: Layout, max_rows: int, budget: int) -> None:
        self.layout = layout
        self.rows = self.positions = 0
        self.tensors: list[Tensor] = [torch.empty(0)] * layout.tensors
        self._max_rows = max_rows
        self._budget = budget

    @property
    def bytes(self) -> int:
        return self.rows * self.positions * self.layout.token_bytes

    def size_for(self, rows: int, positions: int) -> tuple[int, int] | None:
        """The size to take so that `rows` sequences of `positions` tokens fit; None if the budget forbids it.

        Doubled sizes may take half of the budget; beyond that every byte is left to kept sequences.
        """
        if rows <= self.rows and positions <= self.positions:
            return self.rows, self.positions
        doubled_rows = self.rows if rows <= self.rows else min(_power_of_two(rows, 8), self._max_rows)
        doubled_positions = max(self.positions, _power_of_two(positions, 256))
        for size in ((doubled_rows, doubled_positions), (rows, doubled_positions)):
            if size[0] * size[1] * self.layout.token_bytes <= self._budget // 2:
                return size
        if rows * positions * self.layout.token_bytes <= self._budget:
            return rows, positions
        return None

    def resize(self, rows: int, positions: int, live: int) -> None:
        """Keeps the contents of the first `live` rows, up to `positions`."""
        if (rows, positions) == (self.rows, self.positions):
            return
        kept = min(positions, self.positions)
        for index, old in enumerate(self.tensors):
            # Zeros: positions that are masked out still enter the sums, as 0 times their value.
            new = torch.zeros(
                (rows, self.layout.heads, positions, self.layout.dim),
                dtype=self.layout.dtype,
                device=self.layout.device,
            )
            if live:
                new[:live, :, :kept] = old[:live, :, :kept]
            self.tensors[index] = new
        self.rows, self.positions = rows, positions

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in self.tensors:
            tensor[target, :, :length] = tensor[source, :, :length]

    def read(self, row: int, length: int) -> Tensor:
        """A copy: [tensors, heads, length, dim]."""
        return torch.stack([tensor[row, :, :length] for tensor in self.tensors])

    def write(self, row: int, kv: Tensor, length: int) -> None:
        for tensor, part in zip(self.tensors, kv, strict=True):
            tensor[row, :, :length] = part[:, :length]


def _power_of_two(number: int, least: int) -> int:
    return max(least, 1 << (number - 1).bit_length())
