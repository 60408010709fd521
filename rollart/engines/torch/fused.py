"""The forward pass of common decoders, written for steps: few calls, buffers that are used again, no autograd.

transformers computes the same with five times as many operators, which is most of the time of a small model. A model
that is not in `ARCHITECTURES`, or not built as expected, keeps its own forward pass. Weights are copied where that
makes products faster, others are those of the network: when any of them has been replaced, call `refresh`, or `use`
what `load` has made of the new ones while steps went on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollart.engines.torch.attention import ProbedLayer
from rollart.engines.torch.kernels import AttentionSettings, Kernels, Rotation
from rollart.engines.torch.kv_rows import KVLayout
from rollart.engines.torch.panels import PanelProduct
from rollart.engines.torch.products import Affine, Output, Product, product
from rollart.engines.torch.step import StepInputs

# Values of `model_type` whose layers are norm, attention, norm, MLP, with residuals around both halves.
ARCHITECTURES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})  # not those that depend on the length of a sequence
LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
MLP = {"gate_proj", "up_proj", "down_proj"}
MIN_TOKENS = 128  # of the buffers
MAX_VIEWS = 256


@dataclass(slots=True)
class Layer:
    """`mlp` is gate with up, and down; a module where it is a mixture of experts. A `PanelProduct` of gate with up
    applies the activation as well."""

    norms: tuple[Tensor, Tensor]
    qkv: Product
    output: Product
    attention: AttentionSettings
    mlp: tuple[Product, Product] | nn.Module


@dataclass(slots=True)
class FusedWeights:
    """Those of a network, as the forward pass uses them."""

    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Product


@dataclass(slots=True)
class Views:
    """Buffers of a step."""

    x: Tensor
    normed: Tensor
    qkv: Output
    attended: Tensor
    heads: Tensor
    gate_up: Output
    inner: Output


class FusedDecoder:
    def __init__(self, network: Any, layout: KVLayout, probed: list[ProbedLayer], kernels: Kernels) -> None:
        """Use `of`."""
        self._network, self._layout, self._probed = network, layout, probed
        self._heads = probed[0].heads
        self._kernels = kernels
        self._eps = float(network.model.norm.variance_epsilon)
        self._inner = max((int(m.mlp.gate_proj.out_features) for m in network.model.layers if _plain(m.mlp)), default=0)
        self._rotation = Rotation(torch.empty(0), torch.empty(0))
        self._buffers: list[Tensor] = []
        self._views: dict[int, Views] = {}
        self.refresh()

    @classmethod
    def of(cls, network: Any, layout: KVLayout, probed: list[ProbedLayer], kernels: Kernels) -> "FusedDecoder | None":
        """None if the network must be called as it is."""
        config = network.config
        if config.model_type not in ARCHITECTURES or getattr(config, "hidden_act", "") != "silu":
            return None
        body, heads = getattr(network, "model", None), {layer.heads for layer in probed}
        if body is None or len(heads) != 1 or body.rotary_emb.rope_type not in ROTATIONS:
            return None
        if not all(_expected(layer) for layer in body.layers):
            return None
        return cls(network, layout, probed, kernels)

    def refresh(self) -> None:
        """Reads the weights of the network again."""
        self._weights = self.load({})

    def use(self, weights: FusedWeights) -> None:
        self._weights = weights

    def load(self, replaced: Mapping[int, Tensor]) -> FusedWeights:
        """Of the network with these in place of parameters, which are given by their `id`. For any thread."""

        def current(parameter: Tensor) -> Tensor:
            return replaced.get(id(parameter), parameter.data)

        body = self._network.model
        return FusedWeights(
            embedding=current(body.embed_tokens.weight),
            layers=[
                _layer(module, probed, self._eps, current, self._kernels)
                for module, probed in zip(body.layers, self._probed, strict=True)
            ],
            norm=current(body.norm.weight),
            head=_product([(current(self._network.lm_head.weight), None)], self._kernels),
        )

    def forward(self, step: StepInputs) -> Tensor:
        """The logits [wanted, vocabulary] that the step asks for. What the last layer computes after its KV is of use
        only for these."""
        kernels, eps, weights = self._kernels, self._eps, self._weights
        views = self._views_for(step.tokens.shape[1])
        x, normed = views.x, views.normed
        rotation = self._rotate_up_to(step.layers[0].shape[2])
        torch.index_select(weights.embedding, 0, step.tokens[0], out=x)
        wanted, last = step.wanted, len(weights.layers) - 1
        for number, layer in enumerate(weights.layers):
            kernels.rms_norm(x, layer.norms[0], eps, normed)
            qkv = layer.qkv.into(normed, views.qkv)
            kv = step.layers[2 * number], step.layers[2 * number + 1]
            # Experts are recorded for every token.
            chosen = None if number < last or isinstance(layer.mlp, nn.Module) else wanted
            if chosen is not None:
                views, x, wanted = self._views_for(len(chosen)), x.index_select(0, chosen), None
                normed = views.normed
            kernels.attend(qkv, step, layer.attention, rotation, kv, views.heads, chosen)
            if not len(x):
                return x.new_empty((0, len(weights.embedding)))
            x = layer.output.onto(x, views.attended)
            kernels.rms_norm(x, layer.norms[1], eps, normed)
            if isinstance(layer.mlp, nn.Module):
                x.add_(layer.mlp(normed.unsqueeze(0))[0])
                continue
            gate_up, down = layer.mlp
            if isinstance(gate_up, PanelProduct):
                gate_up.into(normed, views.inner)
            else:
                kernels.silu_mul(gate_up.into(normed, views.gate_up), views.inner.whole)
            x = down.onto(x, views.inner.whole)
        if wanted is not None:
            x = x.index_select(0, wanted)
            normed = torch.empty_like(x)
        kernels.rms_norm(x, weights.norm, eps, normed)
        return weights.head.of(normed)

    def _rotate_up_to(self, positions: int) -> Rotation:
        if len(self._rotation.cos) < positions:
            device = self._layout.device
            cos, sin = self._network.model.rotary_emb(
                torch.empty(0, device=device), torch.arange(positions, device=device).unsqueeze(0)
            )
            half = self._layout.dim // 2
            self._rotation = Rotation(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        return self._rotation

    def _views_for(self, count: int) -> Views:
        views = self._views.get(count)
        if views is not None:
            return views
        layout, heads, kv_heads = self._layout, self._heads, self._layout.heads
        hidden = self._weights.embedding.shape[1]
        sizes = [heads * layout.dim, kv_heads * layout.dim, kv_heads * layout.dim]
        if len(self._views) >= MAX_VIEWS or not self._buffers or len(self._buffers[0]) < count:
            self._views.clear()
            most = max(count, len(self._buffers[0]) if self._buffers else MIN_TOKENS)
            self._buffers = [
                torch.empty((most, size), dtype=layout.dtype, device=layout.device)
                for size in (hidden, hidden, sum(sizes), sizes[0], 2 * self._inner, self._inner)
            ]
        x, normed, qkv, attended, gate_up, inner = (buffer[:count] for buffer in self._buffers)
        views = self._views[count] = Views(
            x=x,
            normed=normed,
            qkv=Output(
                qkv.view(count, heads + 2 * kv_heads, layout.dim),
                qkv.tensor_split([sizes[0], sizes[0] + sizes[1]], 1),
            ),
            attended=attended,
            heads=attended.view(count, heads, layout.dim),
            gate_up=Output(gate_up, gate_up.chunk(2, 1)),
            inner=Output(inner, (inner,)),
        )
        return views


def _plain(mlp: nn.Module) -> bool:
    return {name for name, child in mlp.named_children() if type(child) is nn.Linear} == MLP


def _expected(layer: nn.Module) -> bool:
    attention: Any = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return {name for name, _ in layer.named_children()} == LAYER and all(type(one) is nn.Linear for one in projections)


@torch.inference_mode()
def _product(affines: Sequence[Affine], kernels: Kernels, *, gated: bool = False) -> Product:
    if kernels.panels is None or len({bias is None for _, bias in affines}) != 1:
        return product(affines, kernels.matvec)
    return PanelProduct(affines, kernels.panels, gated=gated)


def _layer(
    module: Any, probed: ProbedLayer, eps: float, current: Callable[[Tensor], Tensor], kernels: Kernels
) -> Layer:
    def joined(*linears: nn.Linear, gated: bool = False) -> Product:
        affines = [(current(one.weight), None if one.bias is None else current(one.bias)) for one in linears]
        return _product(affines, kernels, gated=gated)

    def scale(norm: Any) -> Tensor | None:
        return None if norm is None else current(norm.weight)

    attention, mlp = module.self_attn, module.mlp
    return Layer(
        norms=(current(module.input_layernorm.weight), current(module.post_attention_layernorm.weight)),
        qkv=joined(attention.q_proj, attention.k_proj, attention.v_proj),
        output=joined(attention.o_proj),
        attention=AttentionSettings(
            heads=probed.heads,
            scale=probed.scaling,
            window=probed.window,
            q_norm=scale(getattr(attention, "q_norm", None)),
            k_norm=scale(getattr(attention, "k_norm", None)),
            eps=eps,
        ),
        mlp=(joined(mlp.gate_proj, mlp.up_proj, gated=True), joined(mlp.down_proj)) if _plain(mlp) else mlp,
    )
