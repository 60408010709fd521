"""Activations that are computed again in the backward pass instead of being kept (activation checkpointing)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Recompute = Literal["none", "selective", "full"]

_ATEN = torch.ops.aten
_DEAR = frozenset(  # matrix products and attention: most of the time, little of the memory
    getattr(_ATEN, name)
    for name in (
        *("mm", "addmm", "bmm", "linear"),
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    if hasattr(_ATEN, name)
)


def recompute(layers: list[nn.Module], what: Recompute, *, offload: bool = False) -> None:
    """Wrap the forward pass of each layer. `full` keeps only its input; `selective` also what matrix products and
    attention return; `offload` moves what is kept to the memory of the host until the backward pass needs it."""
    for layer in layers:
        layer.forward = _wrapped(layer.forward, what, offload)


def _wrapped(forward: Callable[..., Any], what: Recompute, offload: bool) -> Callable[..., Any]:
    contexts = partial(create_selective_checkpoint_contexts, _policy) if what == "selective" else None
    options: dict[str, Any] = {"use_reentrant": False} | ({"context_fn": contexts} if contexts else {})

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        kept: AbstractContextManager[Any] = save_on_cpu(pin_memory=True) if offload else nullcontext()
        with kept:
            if what == "none":
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, **options, **kwargs)

    return wrapped


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    packet = getattr(operation, "overloadpacket", operation)
    return CheckpointPolicy.MUST_SAVE if packet in _DEAR else CheckpointPolicy.PREFER_RECOMPUTE
