"""The layers of common decoders on one CPU, with few and large operations.

transformers computes a layer in about forty operations, and backwards in a hundred, most of which only pass through
memory what the one before has written. Here a layer has four matrix products, one call of `kernels.c` beside each, and
gradients written by hand. Weights are read from the modules at every pass, so whoever casts or replaces them is
respected. A layer whose numbers are not those of transformers' own, on a short probe, keeps its own forward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rollart.training.kernels import HeadShape, LayerKernels, Sequences
from rollart.training.packing import Packed, pack

CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-4  # of the probe, in float32


def fuse_layers(model: Any, layers: Sequence[Any]) -> "TrainedRows | None":
    """Replace the forward pass of every layer, if all can be; the rows that the last layer computes, if so."""
    settings = [_shape(layer) for layer in layers]
    if None in settings or len({*settings}) != 1:
        return None
    (shape,) = {one for one in settings if one is not None}
    if LayerKernels.of(shape.size, torch.float32) is None or not _same(model, layers[0], shape):
        return None
    rows = TrainedRows()
    for layer in layers:
        layer.forward = FusedLayer(layer, shape, rows if layer is layers[-1] else None)
    return rows


class TrainedRows:
    """The positions that are scored. Of the last layer nothing else is read after attention."""

    rows: Tensor | None = None  # all, before the first pass; kept after a pass, whose layers may be computed again


class FusedLayer:
    def __init__(self, layer: Any, shape: HeadShape, last: TrainedRows | None) -> None:
        self._layer, self._shape, self._last = layer, shape, last

    def __call__(self, states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], packed: Packed, **_: Any) -> Any:
        layer, attention, mlp = self._layer, self._layer.self_attn, self._layer.mlp
        kernels = LayerKernels.of(self._shape.size, states.dtype)
        assert kernels is not None
        x = states[0]
        projections = [getattr(attention, name) for name in PROJECTIONS]
        biases = [one.bias for one in projections[:3] if one.bias is not None]
        norms = [attention.q_norm.weight, attention.k_norm.weight] if hasattr(attention, "q_norm") else []
        x = _AttentionHalf.apply(  # type: ignore[no-untyped-call]
            *(kernels, self._shape, _sequences(packed, position_embeddings), layer.input_layernorm.variance_epsilon),
            *(x, layer.input_layernorm.weight, torch.cat([one.weight for one in projections[:3]])),
            *(torch.cat(biases) if biases else None, projections[3].weight, projections[3].bias, *norms),
        )
        norm, rows = layer.post_attention_layernorm, None if self._last is None else self._last.rows
        weights = norm.weight, torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), mlp.down_proj.weight
        if rows is None or 8 * len(rows) > 7 * len(x):  # copies would cost what is saved
            return _MlpHalf.apply(kernels, norm.variance_epsilon, x, *weights)[None]  # type: ignore[no-untyped-call]
        part = _MlpHalf.apply(kernels, norm.variance_epsilon, x.index_select(0, rows), *weights)  # type: ignore[no-untyped-call]
        return x.index_copy(0, rows, part)[None]


def _sequences(packed: Packed, rotation: tuple[Tensor, Tensor]) -> Sequences:
    half = rotation[0].shape[-1] // 2
    cos, sin = (table[0, :, :half].float().contiguous() for table in rotation)
    return Sequences(cos, sin, packed.spans, packed.bands[0][1])


class _AttentionHalf(torch.autograd.Function):
    """x + attention(norm(x)): [tokens, hidden] to the same."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: LayerKernels,
        shape: HeadShape,
        sequences: Sequences,
        eps: float,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output: Tensor,
        output_bias: Tensor | None,
        *norms: Tensor,
    ) -> Tensor:
        """`weight` [queries, keys and values, hidden]; `norms` of queries and keys, or none."""
        x = x.contiguous()
        normed, scales = kernels.norm(x, norm, eps)
        qkv = normed @ weight.t() if bias is None else torch.addmm(bias, normed, weight.t())
        out, totals = kernels.attend(qkv, norms, shape, sequences)
        ctx.save_for_backward(x, norm, scales, normed, weight, qkv, out, totals, output, *norms)
        ctx.settings = kernels, shape, sequences
        ctx.biases = bias is not None, output_bias is not None
        y = torch.addmm(x, out, output.t())
        return y if output_bias is None else y.add_(output_bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        x, norm, scales, normed, weight, qkv, out, totals, output, *norms = ctx.saved_tensors
        kernels, shape, sequences = ctx.settings
        to_output, to_out = grad.t() @ out, grad @ output
        to_qkv, to_norms = kernels.attend_backward(to_out, out, totals, qkv, norms, shape, sequences)
        to_weight, to_normed = to_qkv.t() @ normed, to_qkv @ weight
        to_x, to_norm = kernels.norm_backward(to_normed, x, norm, scales, grad)
        to_bias, to_output_bias = (
            each.sum(0) if there else None for each, there in zip((to_qkv, grad), ctx.biases, strict=True)
        )
        return *(None,) * 4, to_x, to_norm, to_weight, to_bias, to_output, to_output_bias, *to_norms


class _MlpHalf(torch.autograd.Function):
    """x + down(silu(gate) * up), of norm(x): [tokens, hidden] to the same."""

    @staticmethod
    def forward(
        ctx: Any, kernels: LayerKernels, eps: float, x: Tensor, norm: Tensor, weight: Tensor, down: Tensor
    ) -> Tensor:
        """`weight` [gate and up, hidden]."""
        x = x.contiguous()
        normed, scales = kernels.norm(x, norm, eps)
        gate_up = normed @ weight.t()
        ctx.save_for_backward(x, norm, scales, normed, weight, gate_up, down)
        ctx.kernels = kernels
        return torch.addmm(x, kernels.gate(gate_up), down.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].contiguous()
        x, norm, scales, normed, weight, gate_up, down = ctx.saved_tensors
        to_gate_up, inner = ctx.kernels.gate_backward(gate_up, grad @ down)
        to_weight, to_down = to_gate_up.t() @ normed, grad.t() @ inner
        to_x, to_norm = ctx.kernels.norm_backward(to_gate_up @ weight, x, norm, scales, grad)
        return None, None, to_x, to_norm, to_weight, to_down


def _shape(layer: Any) -> HeadShape | None:
    """None if the layer is not built as expected."""
    if {name for name, _ in layer.named_children()} != CHILDREN:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    modules = [*(getattr(attention, name, None) for name in PROJECTIONS), *(getattr(mlp, name, None) for name in MLP)]
    linear = [module for module in modules if type(module) is nn.Linear]
    size, scale = getattr(attention, "head_dim", 0), getattr(attention, "scaling", None)
    if len(linear) != len(modules) or any(getattr(mlp, name).bias is not None for name in MLP):
        return None
    if not size or scale is None or getattr(attention, "sliding_window", None) is not None:
        return None
    if len({one.bias is None for one in linear[:3]}) != 1:
        return None
    eps = float(getattr(layer.input_layernorm, "variance_epsilon", 0.0))
    heads, kv_heads = (one.out_features // size for one in linear[:2])
    return HeadShape(heads, kv_heads, size, float(scale), eps)


@torch.no_grad()
def _same(model: Any, layer: Any, shape: HeadShape) -> bool:
    """Whether the fused layer computes what the layer does, on two short sequences."""
    packed = pack([range(9), range(5)], [[0, *[1] * 8], [0, *[1] * 4]])
    hidden = layer.input_layernorm.weight.shape[0]
    states = torch.randn(1, packed.tokens.shape[1], hidden, generator=torch.Generator().manual_seed(0))
    rotation = model.base_model.rotary_emb(states, packed.positions)
    settings: dict[str, Any] = {"position_embeddings": rotation, "packed": packed, "context": None}
    try:
        own = layer(states, attention_mask=None, use_cache=False, **settings)
        fused = FusedLayer(layer, shape, None)(states, **settings)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool(torch.allclose(own, fused, rtol=TOLERANCE, atol=TOLERANCE))
