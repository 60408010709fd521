"""KV of the running sequences: dense rows, one tensor per layer for keys and one for values.

Row r of every tensor belongs to the r-th running sequence. Resizing goes tensor by tensor, so the peak is one tensor
above the size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

GRAIN = 128


@dataclass(frozen=True, slots=True)
class KVLayout:
    """KV of one token: `tensors` (keys and values of each layer) of `heads` x `dim` numbers."""

    tensors: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def name(self) -> str:
        """Equal for two engines whose KV is interchangeable, given the same weights."""
        return f"{self.tensors}x{self.heads}x{self.dim} {self.dtype}"

    @property
    def token_bytes(self) -> int:
        return self.tensors * self.heads * self.dim * self.dtype.itemsize


class KVRows:
    def __init__(self, layout: KVLayout, max_rows: int, budget: int) -> None:
        self.layout = layout
        self.rows = self.positions = 0
        self.tensors: list[Tensor] = [torch.empty(0)] * layout.tensors
        self._max_rows = max_rows
        self._budget = budget

    @property
    def bytes(self) -> int:
        return self._bytes(self.rows, self.positions)

    def size_for(self, rows: int, positions: int) -> tuple[int, int] | None:
        """The size to take so that `rows` sequences of `positions` tokens fit; None if the budget forbids it.

        Resizing copies everything, so it takes more than needed: doubled sizes while they leave half of the budget to
        the cache, then as many rows as a growing share of the budget can hold, at last the exact need.
        """
        if rows <= self.rows and positions <= self.positions:
            return self.rows, self.positions
        doubled = max(self.positions, _power_of_two(positions, 256))
        for size in ((min(_power_of_two(max(rows, self.rows), 8), self._max_rows), doubled), (rows, doubled)):
            if self._bytes(*size) <= self._budget // 2:
                return size
        rounded = -(-positions // GRAIN) * GRAIN
        for share in (0.5, 0.75, 1.0):
            most = min(int(self._budget * share) // self._bytes(1, rounded), self._max_rows)
            if most >= rows:
                return most, rounded
        return (rows, positions) if self._bytes(rows, positions) <= self._budget else None

    def _bytes(self, rows: int, positions: int) -> int:
        return rows * positions * self.layout.token_bytes

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

    def write(self, row: int, start: int, kv: Tensor) -> None:
        """`kv` is [tensors, heads, count, dim], for the positions from `start` on."""
        stop = start + kv.shape[2]
        for tensor, part in zip(self.tensors, kv, strict=True):
            tensor[row, :, start:stop] = part


def _power_of_two(number: int, minimum: int) -> int:
    return max(minimum, 1 << (number - 1).bit_length())
