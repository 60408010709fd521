"""LoRA: the policy's own weights stay as they are, and small matrices beside them are trained, through peft.

Adapters are put into the empty model before its ranks shard and load it, so they are sharded like everything else, and
gathered with the layer that they belong to. They are float32 while the frozen weights have the dtype of computation.
With adapters off the policy is the model that training started from: the reference of the KL. The head of a reward
model is new, so it is trained whole beside the adapters, as peft does it with `modules_to_save`.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from rollart.config import LoraConfig
from rollart.core.errors import RollartError
from rollart.core.seeds import seed_of
from rollart.models.adapters import HEAD, IN_MEMORY
from rollart.training.shards import block


def adapted_class(kind: Any, about: Any, config: LoraConfig) -> tuple[Any, dict[str, str]]:
    """A subclass of `kind`, a class of transformers, whose instances have adapters; and the names to load its weights
    by, for `from_pretrained`. `about` is the model's configuration. Raises RollartError if the model lacks a target."""
    with torch.device("meta"):
        targets = target_layers(kind(about), config)

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        _inject(self, config, targets)

    known = kind._keys_to_ignore_on_load_missing or []
    lacking = [*known, rf"{re.escape(IN_MEMORY)}weight$"]  # in the folder: no reason for a warning
    names = {"__init__": make, "__module__": kind.__module__, "_keys_to_ignore_on_load_missing": lacking}
    adapted = type(kind.__name__, (kind,), names)
    layers = {".".join(name.split(".")[-2:]) for name in targets}
    return adapted, {re.escape(f"{layer}."): f"{layer}.base_layer." for layer in layers}


def target_layers(model: Any, config: LoraConfig) -> list[str]:
    """The names of the linear layers that get adapters, of the decoder alone: the head is trained whole or not at all.
    Raises RollartError if a target is not there."""
    inside = {id(each) for each in model.base_model.modules()} - {id(model.get_output_embeddings())}
    linear = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and id(each) in inside]
    if config.targets == "all":
        return linear
    found = [name for name in linear if name.rpartition(".")[2] in config.targets]
    missing = set(config.targets) - {name.rpartition(".")[2] for name in found}
    if missing:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise RollartError(
            f"training.lora.targets: {type(model).__name__} has no linear layer called "
            f"{', '.join(sorted(missing))}; it has {known}"
        )
    return found


def _inject(model: Any, config: LoraConfig, targets: list[str]) -> None:
    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=targets)
    peft.inject_adapter_in_model(settings, model)
    for name, module in model.named_modules():
        if name == HEAD:
            module.float()
        if IN_MEMORY in f"{name}.":
            module.float()
            module._is_hf_initialized = True  # transformers leaves them to `reset_adapters`


@torch.no_grad()
def reset_adapters(model: nn.Module) -> None:
    """Random A and zero B, so that nothing is added yet. They follow from torch's seed and the name, so they are the
    same in every layout."""
    for name, parameter in adapter_parameters(model).items():
        part = block(parameter)
        if ".lora_B." in name:
            part.values.zero_()
            continue
        draw = torch.Generator().manual_seed(seed_of(torch.initial_seed(), name))
        bound = 1 / math.sqrt(part.shape[1])
        whole = torch.empty(part.shape).uniform_(-bound, bound, generator=draw)
        where = tuple(slice(at, at + size) for at, size in zip(part.offset, part.values.shape, strict=True))
        part.values.copy_(whole[where])


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if IN_MEMORY in name}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """For passes without gradients. peft's own switch would also freeze the adapters."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
