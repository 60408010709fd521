"""RMS norm as one function.

transformers writes it as six elementwise operations, with a dozen more in the backward pass; on a small model they take
more time than some of the matrix products.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class _RMSNorm(torch.autograd.Function):
    """Computes in float32, whatever the dtype of the states."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        full = states.float()
        norm = torch.linalg.vector_norm(full, dim=-1, keepdim=True)
        scale = norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()
        unit: Tensor = (full * scale).to(states.dtype)
        ctx.save_for_backward(unit, scale, weight)
        out: Tensor = unit * weight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, scale, own = ctx.saved_tensors
        size = own.shape[0]
        grad, unit, weight = grads[0].float(), unit.float(), own.float()
        product = (grad * unit).reshape(-1, size)
        along = (product @ weight).div_(size).view(scale.shape)
        to_states = torch.addcmul(grad * weight, unit, along, value=-1).mul_(scale)
        return to_states.to(grads[0].dtype), product.sum(0).to(own.dtype), None


def rms_norm(module: nn.Module, states: Tensor) -> Tensor:
    out: Tensor = _RMSNorm.apply(states, module.weight, module.variance_epsilon)  # type: ignore[no-untyped-call]
    return out


def use_fast_norms(model: nn.Module) -> int:
    """Replace the RMS norms of `model`, those of each class only if it computes the same thing; returns how many."""
    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    same = {kind: _is_rms_norm(kind) for kind in {type(module) for module in norms}}
    chosen = [module for module in norms if same[type(module)]]
    for module in chosen:
        module.forward = partial(rms_norm, module)
    return len(chosen)


@torch.no_grad()
def _is_rms_norm(kind: type[nn.Module]) -> bool:
    """Tried on a small one of its own: the weights of a model may be sharded."""
    size = 8
    try:
        probe = kind(size)
    except TypeError:
        return False
    weight = getattr(probe, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != (size,):
        return False
    weight.copy_(torch.linspace(0.5, 2, size))
    states = torch.linspace(-2, 3, 3 * size).view(3, size)
    return torch.allclose(probe(states), rms_norm(probe, states), atol=1e-5)
