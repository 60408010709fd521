"""Adapters (LoRA) outside of training: their names in files and publications, and the weights that they make of a base.

A linear layer with weight W computes with W + scale B A. The names are those of peft's files, so that engines and
other programs load them; `base_model.model.` stands before the name that the layer has in transformers.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rollart.core.errors import RollartError
from rollart.models.folder import ADAPTER_CONFIG

WEIGHTS = "adapter_model.safetensors"
IN_MEMORY = ".default."  # peft's name for the only adapter of a model
HEAD = "score"  # of a reward model, in transformers; new, so it is kept whole beside the adapters
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def file_name(parameter: str) -> str:
    """Of a parameter of a model with adapters.

    >>> file_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return _PREFIX + parameter.replace(IN_MEMORY, ".")


@dataclass(frozen=True, slots=True)
class LinearAdapter:
    """What is added to the weight of one linear layer."""

    a: Tensor
    b: Tensor
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """The sum in float32, of the dtype of `weight`: rounded once."""
        whole = weight.float().addmm(self.b.float(), self.a.float(), alpha=self.scale)
        return whole.to(weight.dtype)


def adapters_of(tensors: Mapping[str, Tensor], scale: float) -> Iterator[tuple[str, LinearAdapter]]:
    """By the name of the weight that each changes. Raises RollartError if something else is among the `tensors`."""
    for name, tensor in tensors.items():
        other = name.removesuffix(_A) + _B if name.endswith(_A) else name.removesuffix(_B) + _A
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)) or other not in tensors:
            raise RollartError(f"the adapter has {name!r}, which is not one of a pair {_A[1:]} and {_B[1:]}")
        if name.endswith(_A):
            yield name.removeprefix(_PREFIX).removesuffix(_A) + ".weight", LinearAdapter(tensor, tensors[other], scale)


def split_head(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The adapters, and the head of a reward model by its names in transformers."""
    head = {name: tensor for name, tensor in tensors.items() if name.startswith(f"{_PREFIX}{HEAD}.")}
    others = {name: tensor for name, tensor in tensors.items() if name not in head}
    return others, {name.removeprefix(_PREFIX): tensor for name, tensor in head.items()}


def holds_adapters(tensors: Mapping[str, Tensor]) -> bool:
    return next(iter(tensors), "").startswith(_PREFIX)


def peft_config(*, base: str, rank: int, alpha: float, targets: list[str], scores: bool = False) -> dict[str, Any]:
    """The values of `adapter_config.json`. `scores`: of a reward model."""
    kind = {"task_type": "SEQ_CLS", "modules_to_save": [HEAD]} if scores else {"task_type": "CAUSAL_LM"}
    return {
        "peft_type": "LORA",
        **kind,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def read_config(folder: Path) -> tuple[str, float]:
    """The base of an adapter, and its scale. Raises RollartError."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_bytes())
        base, scale = str(config["base_model_name_or_path"]), float(config["lora_alpha"]) / int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RollartError(f"{folder / ADAPTER_CONFIG} is damaged: {error}") from error
    if config.get("use_dora") or config.get("use_rslora") or config.get("peft_type") != "LORA":
        raise RollartError(f"{folder} has an adapter of another kind than plain LoRA")
    if config.get("modules_to_save"):
        raise RollartError(
            f"{folder} has whole layers beside its adapter, as that of a reward model has: "
            "export its run without --adapter"
        )
    return base, scale
