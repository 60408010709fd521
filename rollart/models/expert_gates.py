"""The gates of a mixture of experts: the modules that choose experts for tokens.

A gate returns the logits of all experts, the weights of the chosen ones, and their ids: `[tokens, experts]`, and twice
`[tokens, choices]`. Only gates whose weights are a softmax of the logits, over all experts or over the chosen ones, are
known here; this is tried on a small one, not read from names.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollart.core.expert_choice import ChoiceShape

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ExpertGates:
    """`modules` by decoder layer. `normalised`: the weights of the chosen experts add up to 1."""

    modules: dict[int, nn.Module]
    layers: int
    experts: int
    choices: int
    normalised: bool

    @classmethod
    def of(cls, model: Any) -> "ExpertGates | None":
        """None for a dense model, and for gates that are not known."""
        kinds = _kinds(model)
        modules: dict[int, nn.Module] = {}
        for name, module in model.named_modules():
            found = _LAYER.search(f".{name}.")
            if found and isinstance(module, kinds):
                modules[int(found[1])] = module
        if not modules:
            return None
        probed = _probe(next(kind for kind in kinds if isinstance(next(iter(modules.values())), kind)), model.config)
        if probed is None:
            return None
        experts, choices, normalised = probed
        return cls(modules, int(model.config.num_hidden_layers), experts, choices, normalised)

    @property
    def shape(self) -> ChoiceShape:
        return ChoiceShape.of(self.layers, self.choices, self.experts)

    def weights(self, probabilities: Tensor, chosen: Tensor) -> Tensor:
        """Of the chosen experts, from the probabilities of all."""
        return _weights(probabilities, chosen, self.normalised)


def _weights(probabilities: Tensor, chosen: Tensor, normalised: bool) -> Tensor:
    weights = probabilities.gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if normalised else weights


def _kinds(model: Any) -> tuple[type[nn.Module], ...]:
    """Classes of the modules whose logits transformers can record."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", ())
    each = recorded if isinstance(recorded, Sequence) else (recorded,)
    kinds = (getattr(recorder, "target_class", recorder) for recorder in each)
    return tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.Module))


@torch.no_grad()
def _probe(kind: type, config: Any) -> tuple[int, int, bool] | None:
    """The numbers of experts and choices, and whether their weights are normalised; None if it computes otherwise."""
    try:
        gate = kind(config)
        for weight in gate.parameters():  # small: where all weight is on the chosen ones, both ways are the same
            weight.copy_(torch.linspace(-1, 1, weight.numel()).sin().view_as(weight) / config.hidden_size)
        states = torch.linspace(-2, 3, 3 * config.hidden_size).cos().view(3, config.hidden_size)
        logits, weights, chosen = gate(states)
        probabilities = logits.float().softmax(-1)
        for normalised in (True, False):
            if torch.allclose(_weights(probabilities, chosen, normalised), weights.float(), atol=1e-5):
                return int(logits.shape[1]), int(chosen.shape[1]), normalised
    except (TypeError, ValueError, RuntimeError, AttributeError):
        pass
    return None
