"""KV of the running sequences: dense rows, one tensor per layer for keys and one for values.

Row r of every tensor belongs to the r-th running sequence. Resizing goes tensor by tensor, so the peak is one tensor
above the size.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRAIN = 128
# An array of the addresses of all tensors; then the offset of a row and the distance of its heads, in bytes.
Pointers = Sequence[int | None] | ctypes.Array[ctypes.c_void_p]
Place = tuple[Pointers, int, int]
CopyHeads = Callable[[Pointers, int, int, Pointers, int, int, int, int, int], None]


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
    def __init__(self, layout: KVLayout, max_rows: int, budget: int, copy_heads: CopyHeads | None = None) -> None:
        """Rows are copied by `copy_heads`, or by torch, which takes ten times as long for the short rows of a CPU."""
        self.layout = layout
        self._copy_heads = copy_heads
        self._pointers: Pointers = ()
        self.rows = self.positions = 0
        self.tensors: list[Tensor] = [torch.empty(0)] * layout.tensors
        self._max_rows = max_rows
        self._budget = budget

    @property
    def bytes(self) -> int:
        return self._bytes(self.rows, self.positions)

    def size_for(self, rows: int, positions: int, expected: int = 0) -> tuple[int, int] | None:
        """The size to take so that `rows` sequences of `positions` tokens fit, and soon `expected` ones if possible;
        None if the budget forbids it.

        Resizing copies everything, so it takes more than needed: doubled sizes while they leave half of the budget to
        the cache, then as many rows as a growing share of the budget can hold, at last the exact need.
        """
        if rows <= self.rows and positions <= self.positions:
            return self.rows, self.positions
        doubled, rounded = max(self.positions, _power_of_two(positions, 256)), -(-positions // GRAIN) * GRAIN
        for wanted in (max(rows, min(expected, self._max_rows)), rows):
            size = min(_power_of_two(max(wanted, self.rows), 8), self._max_rows), doubled
            if self._bytes(*size) <= self._budget // 2:
                return size
            for length, share in ((doubled, 0.5), (rounded, 0.5), (rounded, 0.75), (rounded, 1.0)):
                most = min(int(self._budget * share) // self._bytes(1, length), self._max_rows)
                if most >= wanted:
                    return most, length
        return (rows, positions) if self._bytes(rows, positions) <= self._budget else None

    def _bytes(self, rows: int, positions: int) -> int:
        return rows * positions * self.layout.token_bytes

    def resize(self, rows: int, positions: int, live: int, kept: int) -> None:
        """Keeps the first `kept` positions of the first `live` rows."""
        if (rows, positions) == (self.rows, self.positions):
            return
        shape = rows, self.layout.heads, positions, self.layout.dim
        for index, old in enumerate(self.tensors):
            # Zeros: positions that are masked out still enter the sums, as 0 times their value.
            new = _zeros(shape, self.layout.dtype, self.layout.device)
            if live:
                new[:live, :, :kept] = old[:live, :, :kept]
            self.tensors[index] = new
        self.rows, self.positions = rows, positions
        if self._copy_heads is not None:
            self._pointers = pointers(tensor.data_ptr() for tensor in self.tensors)

    @property
    def _head_bytes(self) -> int:
        return self.positions * self.layout.dim * self.layout.dtype.itemsize

    def _move(self, source: Place, target: Place, length: int) -> bool:
        """False if torch must do it."""
        if self._copy_heads is None:
            return False
        layout = self.layout
        size = length * layout.dim * layout.dtype.itemsize
        self._copy_heads(*source, *target, layout.tensors, layout.heads, size)
        return True

    def _place(self, row: int, start: int = 0) -> Place:
        head = self._head_bytes
        return (
            self._pointers,
            row * self.layout.heads * head + start * self.layout.dim * self.layout.dtype.itemsize,
            head,
        )

    def copy(self, source: int, target: int, length: int) -> None:
        if self._move(self._place(source), self._place(target), length):
            return
        for tensor in self.tensors:
            tensor[target, :, :length] = tensor[source, :, :length]

    def read(self, row: int, length: int) -> Tensor:
        """A copy: [tensors, heads, length, dim]."""
        if self._copy_heads is None:
            return torch.stack([tensor[row, :, :length] for tensor in self.tensors])
        layout = self.layout
        out = torch.empty((layout.tensors, layout.heads, length, layout.dim), dtype=layout.dtype)
        self._move(self._place(row), _outside(out), length)
        return out

    def write(self, row: int, start: int, kv: Tensor) -> None:
        """`kv` is [tensors, heads, count, dim], for the positions from `start` on."""
        count = kv.shape[2]
        plain = (
            kv.dtype == self.layout.dtype
            and kv.device == self.layout.device
            and kv.stride()[2:] == (self.layout.dim, 1)
        )
        if plain and self._move(_outside(kv), self._place(row, start), count):
            return
        for tensor, part in zip(self.tensors, kv, strict=True):
            tensor[row, :, start : start + count] = part


def pointers(addresses: Iterable[int]) -> Pointers:
    found = list(addresses)
    return (ctypes.c_void_p * len(found))(*found)


def _outside(kv: Tensor) -> Place:
    size, first = kv.element_size(), kv.data_ptr()
    step, head = kv.stride(0) * size, kv.stride(1) * size
    return pointers(range(first, first + step * len(kv), step)), 0, head


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, pages of the system that take memory and time when they are first written: most rows are larger than
    their sequences need."""
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _power_of_two(number: int, minimum: int) -> int:
    return max(minimum, 1 << (number - 1).bit_length())
