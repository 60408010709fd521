"""Faster arithmetic for what transformers models are made of, with the same results.

RMS norm is written there as six elementwise operations, whose backward pass is a dozen more; on a small model they take
more time than some of the matrix products. Here it is one function with a backward pass of its own.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        scale = norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()
        unit: Tensor = states * scale
        ctx.save_for_backward(unit, scale, weight)
        return unit * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, weight = ctx.saved_tensors
        size = weight.shape[0]
        product = (grads[0] * unit).reshape(-1, size)
        along = (product @ weight).div_(size).view(scale.shape)
        to_states = torch.addcmul(grads[0] * weight, unit, along, value=-1).mul_(scale)
        return to_states, product.sum(0), None


def rms_norm(module: nn.Module, states: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(states, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


@torch.no_grad()
def use_fast_norms(model: nn.Module) -> int:
    """Replace the RMS norms of `model`, each only if it computes the same thing; returns how many."""
    replaced = 0
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not hasattr(module, "variance_epsilon") or not isinstance(weight, Tensor) or weight.ndim != 1:
            continue
        probe = torch.linspace(-2, 3, 3 * len(weight)).view(3, -1)
        if torch.allclose(module(probe), rms_norm(module, probe), atol=1e-5):
            module.forward = partial(rms_norm, module)
            replaced += 1
    return replaced
