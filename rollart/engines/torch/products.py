"""Products with the weights of a model by torch, for steps of few or many tokens.

oneDNN reads a weight in a layout of its own up to 2.5 times as fast as BLAS reads it as it is, most so for 2 to 16
tokens. That takes a copy of the weight, and a call takes some microseconds longer, so small weights stay as they are.
The operators are those of torch's own compiler; where they are missing or differ, every weight stays as it is. For one
token a plain pass over the weight is fastest, by the engine's own kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

PACK_FROM = 1 << 17  # numbers of a weight
ROWS = 16  # tokens that the layout is made for; it serves other numbers as well
Affine = tuple[Tensor, Tensor | None]  # weight [outputs, inputs] and bias
MatVec = Callable[[Tensor, Affine, Tensor | None, Tensor], None]  # x, weight and bias, what to add to, out


@dataclass(slots=True)
class Output:
    """A buffer, and the columns of it that each of several weights fills."""

    whole: Tensor
    parts: tuple[Tensor, ...]


class Product(Protocol):
    def into(self, x: Tensor, out: Output) -> Tensor:
        """The product, in `out` or in memory of its own."""
        ...

    def onto(self, total: Tensor, x: Tensor) -> Tensor:
        """`total` with the product added, in place or in memory of its own."""
        ...

    def of(self, x: Tensor) -> Tensor: ...


class PlainProduct:
    def __init__(self, affines: Sequence[Affine]) -> None:
        self._affines = [(weight.t(), bias) for weight, bias in affines]

    def into(self, x: Tensor, out: Output) -> Tensor:
        for (weight, bias), part in zip(self._affines, out.parts, strict=True):
            if bias is None:
                torch.mm(x, weight, out=part)
            else:
                torch.addmm(bias, x, weight, out=part)
        return out.whole

    def onto(self, total: Tensor, x: Tensor) -> Tensor:
        ((weight, bias),) = self._affines
        torch.addmm(total, x, weight, out=total)
        return total if bias is None else total.add_(bias)

    def of(self, x: Tensor) -> Tensor:
        ((weight, bias),) = self._affines
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


class PackedProduct:
    """Several weights are one: their outputs lie side by side."""

    def __init__(self, affines: Sequence[Affine], matvec: MatVec | None) -> None:
        self._affines, self._matvec = affines, matvec
        weights = [weight for weight, _ in affines]
        self._weight = _pack(weights[0].contiguous() if len(weights) == 1 else torch.cat(weights))
        biases = [bias for _, bias in affines if bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def into(self, x: Tensor, out: Output) -> Tensor:
        if len(x) > 1 or self._matvec is None:
            return _linear(x, self._weight, self._bias).view(out.whole.shape)
        for affine, part in zip(self._affines, out.parts, strict=True):
            self._matvec(x, affine, None, part)
        return out.whole

    def onto(self, total: Tensor, x: Tensor) -> Tensor:
        if len(x) > 1 or self._matvec is None:
            return _linear_add(x, total, self._weight, self._bias)
        self._matvec(x, self._affines[0], total, total)
        return total

    def of(self, x: Tensor) -> Tensor:
        if len(x) > 1 or self._matvec is None:
            return _linear(x, self._weight, self._bias)
        out = x.new_empty((1, len(self._affines[0][0])))
        self._matvec(x, self._affines[0], None, out)
        return out


@torch.inference_mode()
def product(affines: Sequence[Affine], matvec: MatVec | None = None) -> Product:
    """With one weight, or with several whose outputs lie side by side. `matvec` is for steps of one token."""
    biases = {bias is None for _, bias in affines}
    large = sum(weight.numel() for weight, _ in affines) >= PACK_FROM
    packed = large and len(biases) == 1 and affines[0][0].device.type == "cpu" and _can_pack(affines[0][0].dtype)
    if not packed:
        return PlainProduct(affines)
    return PackedProduct(affines, matvec if all(weight.is_contiguous() for weight, _ in affines) else None)


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has the operators, and they compute what a plain product does."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight, x = torch.eye(32, dtype=dtype), torch.arange(64.0).view(2, 32).to(dtype)
    try:
        packed = _pack(weight)
        return torch.equal(_linear(x, packed, None), x) and torch.equal(_linear_add(x, x, packed, None), x + x)
    except (AttributeError, RuntimeError, TypeError):
        return False


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


def _linear_add(x: Tensor, total: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, total, packed, bias, "add")
    return result
