"""Our code in vLLM's workers: new weights, read straight from shared memory.

Loaded by vLLM's own Python, which has nothing else of ours: so only the standard library and torch. Its folder holds
nothing else, because it is put on that Python's path.

Invariants: `rollart_prepare` changes nothing that generation uses, and fails if a file cannot be read, so a worker that
cannot see the weights keeps the old ones; `rollart_swap` is only called while generation is paused. The files stay open
in between, and their writer keeps them unchanged until the swap has ended.
"""

import math
import mmap
from collections.abc import Iterator
from typing import Any

import torch


class Workers:
    """vLLM makes it a base class of its workers."""

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
        _forget_kernels(self.model_runner.model)
        self.model_runner.reload_weights(weights_iterator=_read(maps, tensors))


def _forget_kernels(model: torch.nn.Module) -> None:
    """On CPUs the weights of experts are padded and packed for a kernel when that is made, which vLLM 0.32 does not do
    again for new weights: they would be refused, or used unpacked. Without its kernel a layer makes it again."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        weight = next(module.parameters(), None)
        if getattr(method, "moe_kernel", None) is not None and weight is not None and weight.device.type == "cpu":
            method.moe_kernel = None


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        # A private mapping, which torch takes for writable; nothing is written, so no page is copied.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _read(maps: list[mmap.mmap], tensors: list[dict[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the files; only a tensor in several pieces is copied."""
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
