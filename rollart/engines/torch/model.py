"""The transformers model: a plain forward pass with our attention, and weights that can be replaced in place."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rollart.core.errors import EngineFailed
from rollart.engines.torch.attention import PROBE, ROWS, ProbedLayer
from rollart.engines.torch.fused import FusedDecoder, FusedWeights
from rollart.engines.torch.kernels import kernels_for
from rollart.engines.torch.kv_rows import KVLayout
from rollart.engines.torch.step import StepInputs
from rollart.models.adapters import adapters_of, holds_adapters
from rollart.models.disk_names import DiskNames
from rollart.models.expert_gates import ExpertGates

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """New weights by name, and what the fused forward pass makes of them, if it makes copies."""

    tensors: Weights
    fused: FusedWeights | None = None


class EngineModel:
    def __init__(self, network: Any, *, record_experts: bool = False, adapter_scale: float = 1.0) -> None:
        """Takes over a transformers causal LM, which then attends to our KV rows. `experts` has those of each step, if
        they are recorded. `adapter_scale` is that of adapters that are published to it."""
        if not network._supports_attention_backend:
            raise EngineFailed(
                f"{type(network).__name__} does not support custom attention functions; choose another model"
            )
        self.network = network.eval().requires_grad_(False)
        self.vocabulary = int(network.get_input_embeddings().weight.shape[0])
        self.context = int(getattr(network.config, "max_position_embeddings", None) or 1 << 20)
        self.layout, probed = _layout(network)
        self._weights = _weights(network)
        self._disk_names = DiskNames(network)
        self._adapter_scale, self._base = adapter_scale, Weights()
        self.experts = ExpertRecorder(network) if record_experts else None
        network.set_attn_implementation(ROWS)
        self.kernels = kernels_for(self.layout, probed[0].heads)
        self.fused = FusedDecoder.of(network, self.layout, probed, self.kernels)

    @classmethod
    def open(
        cls, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
    ) -> "EngineModel":
        """`options` are those of the constructor."""
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device)
        return cls(network, **options)

    def forward(self, step: StepInputs) -> Tensor:
        """The logits [wanted, vocabulary] that the step asks for."""
        if self.fused is not None:
            return self.fused.forward(step)
        out = self.network(
            input_ids=step.tokens,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=0 if step.wanted is None else step.wanted,
            step=step,
        )
        logits: Tensor = out.logits
        return logits[0]

    def expert_rows(self) -> memoryview | None:
        """Of the tokens of the last step, if they are recorded."""
        return None if self.experts is None else self.experts.rows()

    def prepare(self, tensors: Mapping[str, Tensor]) -> PreparedWeights:
        """Checks weights and casts them to our dtype, so that `replace` has little to do. For any thread. On the same
        device the network's are not copied, except experts, which are matrices of their own in publications: `replace`
        points to them, and nothing may change them."""
        weights = self._merged(tensors) if holds_adapters(tensors) else self._cast(tensors)
        if self.fused is None or self.layout.device.type != "cpu":
            return PreparedWeights(weights)
        by_id = {id(self._weights[name]): tensor for name, tensor in weights.items()}
        return PreparedWeights(weights, self.fused.load(by_id))

    def _cast(self, tensors: Mapping[str, Tensor]) -> Weights:
        tensors = self._disk_names.merged(tensors, {name: weight.shape for name, weight in self._weights.items()})
        prepared: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in tensors.items():
            weight = self._weights.get(name)
            if weight is None or weight.shape != tensor.shape:
                has = "has none of that name" if weight is None else f"has {list(weight.shape)}"
                raise EngineFailed(
                    f"the new weights have {name!r} of shape {list(tensor.shape)} where the model {has}; "
                    "publish weights of the same model"
                )
            if id(weight) not in prepared:
                here = tensor.to(dtype=weight.dtype)
                # Pinned memory is copied to a GPU without waiting for the CPU; that of a file is not pinned.
                prepared[id(weight)] = name, here.pin_memory() if weight.is_cuda else here
        missing = [name for name, weight in self._weights.items() if id(weight) not in prepared]
        if missing:
            raise EngineFailed(f"the new weights lack {', '.join(missing)}; publish all weights of the model")
        return dict(prepared.values())

    def _merged(self, tensors: Mapping[str, Tensor]) -> Weights:
        """Adapters as new weights of the layers that they change: a step then costs what it does without them, and all
        that is exposed of the swap is a pointer per weight. They are always added to the weights that the engine
        started with, kept in the memory of the host: taking the last ones out again would round."""
        merged = {}
        for name, adapter in adapters_of(tensors, self._adapter_scale):
            weight = self._weights.get(name)
            if weight is None or weight.shape != (adapter.b.shape[0], adapter.a.shape[1]):
                raise EngineFailed(f"the new adapter changes {name!r}, which the model has not, or in another shape")
            if name not in self._base:
                self._base[name] = weight.detach().cpu()
            whole = adapter.merged(self._base[name])
            merged[name] = whole.pin_memory() if weight.is_cuda else whole
        return merged

    def replace(self, prepared: PreparedWeights) -> None:
        """On another device the model keeps its memory: there is seldom room for a second set."""
        for name, tensor in prepared.tensors.items():
            weight = self._weights[name]
            if weight.device == tensor.device:
                weight.data = tensor
            else:
                weight.copy_(tensor, non_blocking=True)
        if self.fused is not None and prepared.fused is not None:
            self.fused.use(prepared.fused)
        else:
            self.weights_changed()

    def weights_changed(self) -> None:
        """Call after any change of the network's parameters, between two steps."""
        if self.fused is not None:
            self.fused.refresh()


class ExpertRecorder:
    """Keeps the ids of the experts that the gates of a mixture choose, until they are read."""

    def __init__(self, network: Any) -> None:
        gates = ExpertGates.of(network)
        if gates is None:
            raise EngineFailed(
                f"{type(network).__name__} has no experts whose choice could be recorded; "
                "set training.replay_experts to false"
            )
        self.shape = gates.shape
        self._dtype = torch.uint8 if self.shape.width == 1 else torch.uint16
        self._chosen: dict[int, Tensor] = {}
        for layer, gate in gates.modules.items():
            gate.register_forward_hook(partial(self._record, layer))

    def _record(self, layer: int, gate: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        self._chosen[layer] = output[2]

    def rows(self) -> memoryview:
        """Token by token, in the form of `ExpertChoices`."""
        some = next(iter(self._chosen.values()))
        ids = torch.full((len(some), self.shape.layers, self.shape.choices), -1, dtype=torch.long, device=some.device)
        for layer, chosen in self._chosen.items():
            ids[:, layer] = chosen
        self._chosen.clear()
        return memoryview(ids.to(self._dtype).cpu().numpy().tobytes())


def _weights(network: nn.Module) -> Weights:
    """The weights by name; tied ones under all of their names."""
    return dict(network.state_dict(keep_vars=True))


@torch.inference_mode()
def _layout(network: Any) -> tuple[KVLayout, list[ProbedLayer]]:
    """The shape of the KV, found by a pass over one token: configurations name it in too many ways."""
    network.set_attn_implementation(PROBE)
    weight = network.get_input_embeddings().weight
    probed: dict[int, ProbedLayer] = {}
    zero = torch.zeros((1, 1), dtype=torch.long, device=weight.device)
    network(input_ids=zero, position_ids=zero, use_cache=False, probed=probed)
    distinct = {shape for layer in probed.values() for shape in (layer.key, layer.value)}
    if sorted(probed) != list(range(len(probed))) or len(distinct) != 1:
        raise EngineFailed(
            f"{type(network).__name__} has layers with unlike keys and values, or without any; choose a plain decoder"
        )
    _, heads, _, dim = distinct.pop()
    layers = [probed[number] for number in range(len(probed))]
    return KVLayout(2 * len(layers), heads, dim, weight.dtype, weight.device), layers
