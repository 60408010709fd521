"""The attention function that transformers models call: writes this step's KV into the rows, then attends to them.

Registered under our own name, for which transformers builds no mask; models pass the step down to their layers as a
keyword argument.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rollart.core.errors import EngineFailed
from rollart.engines.torch.step import AttentionSpan, StepInputs

ROWS = "rollart_rows"
PROBE = "rollart_probe"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    step: StepInputs | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """`query` is [1, heads, tokens, dim], `key` and `value` [1, kv heads, tokens, dim]; returns [1, tokens, ...]."""
    if step is None:
        raise EngineFailed(f"{type(module).__name__} does not pass keyword arguments to its attention function")
    if any(extra.get(name) is not None for name in ("softcap", "s_aux", "position_bias")):
        raise EngineFailed(f"{type(module).__name__} uses soft caps, sinks or position biases, which are not supported")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    keys, values = step.layers[2 * layer], step.layers[2 * layer + 1]
    write_kv(step, (keys, values), key[0].transpose(0, 1), value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    parts = [
        attend_span(query=rows, keys=keys, values=values, span=span, scaling=scaling, window=sliding_window)
        for span in step.spans
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def write_kv(step: StepInputs, kv: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
    """`key` and `value` are [tokens, kv heads, dim]."""
    dim = key.shape[2]
    kv[0].view(-1, dim).index_copy_(0, step.slots, key.reshape(-1, dim))
    kv[1].view(-1, dim).index_copy_(0, step.slots, value.reshape(-1, dim))


def attend_span(
    query: Tensor, keys: Tensor, values: Tensor, span: AttentionSpan, scaling: float | None, window: int | None
) -> Tensor:
    """`query` is [tokens, heads, dim], of the whole step; returns the same shape for the span's tokens."""
    heads, dim = query.shape[1:]
    keys, values = keys[span.rows, :, : span.keys], values[span.rows, :, : span.keys]
    bias = span.bias(window)
    if span.queries == 1:
        # Query heads that share a KV head become its queries: nothing is repeated.
        grouped = query[span.tokens].reshape(-1, keys.shape[1], heads // keys.shape[1], dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scaling)
        return out.reshape(-1, heads, dim)
    padding = span.padding()
    padded = query[span.tokens] if padding is None else query[padding[0]]
    padded = padded.view(keys.shape[0], span.queries, heads, dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        padded, keys, values, attn_mask=bias, scale=scaling, enable_gqa=keys.shape[1] != heads
    )
    out = out.transpose(1, 2).reshape(-1, heads, dim)
    return out if padding is None else out[padding[1]]


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """What a layer gives to its attention function."""

    heads: int
    key: torch.Size
    value: torch.Size
    scaling: float
    window: int | None


def probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    probed: dict[int, ProbedLayer],
    scaling: float | None = None,
    sliding_window: int | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attends to nothing; records by layer what it gets."""
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    probed[layer] = ProbedLayer(query.shape[1], key.shape, value.shape, scale, sliding_window)
    return query[..., : value.shape[3]].transpose(1, 2), None


AttentionInterface.register(ROWS, attend)
AttentionInterface.register(PROBE, probe)
