"""What vLLM's workers run of ours: new weights, read straight from the memory that all processes of a machine share.

Loaded by vLLM's own Python, which has nothing of ours beside this file: so only the standard library and torch. The
folder that it is in holds nothing else, for it is put on that Python's path.

Invariants: `rollart_prepare` changes nothing that generation uses, and fails if a file cannot be read, so a worker that
cannot see the weights keeps the old ones; `rollart_swap` is only called while generation is paused. The files are held
open from the one to the other, and whoever wrote them keeps them unchanged until the swap has ended.
"""

import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch


class Workers:
    """vLLM makes it a base of its worker class, in each worker of a server."""

    model_runner: Any
    _rollart_prepared: "tuple[list[mmap.mmap], list[dict[str, Any]]] | None" = None

    def rollart_prepare(self, files: list[str], tensors: list[dict[str, Any]]) -> None:
        """`tensors` have a `name`, a `dtype`, a `shape` and `pieces`: [file, byte in it, first element, elements]."""
        self._rollart_prepared = [_mapped(path) for path in files], tensors

    def rollart_swap(self) -> None:
        """Each worker takes its part of every tensor."""
        if self._rollart_prepared is None:
            raise RuntimeError("rollart_swap was called before rollart_prepare")
        maps, tensors = self._rollart_prepared
        self._rollart_prepared = None
        self.model_runner.reload_weights(weights_iterator=_read(maps, tensors))


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        # A private mapping, which torch takes for writable; nobody writes, so no page is ever copied.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _read(maps: list[mmap.mmap], tensors: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the files, except for a tensor that is cut into pieces, which is put together."""
    for tensor in tensors:
        dtype, shape, pieces = getattr(torch, tensor["dtype"]), tensor["shape"], tensor["pieces"]
        parts = [torch.frombuffer(maps[file], dtype=dtype, count=n, offset=at) for file, at, _, n in pieces if n]
        if len(parts) == 1:
            yield tensor["name"], parts[0].reshape(shape)
            continue
        whole = torch.empty(math.prod(shape), dtype=dtype)
        for part, (_, _, start, n) in zip(parts, (piece for piece in pieces if piece[3]), strict=True):
            whole[start : start + n] = part
        yield tensor["name"], whole.reshape(shape)
