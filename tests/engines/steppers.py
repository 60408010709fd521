"""Steppers of tiny models, and what to ask of them."""

import random
from typing import Any

from tiny_decoders import VOCABULARY, twin

from rollart.config import EngineConfig
from rollart.core.types import Completion, GenerationRequest
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper


def engine(network: Any, **config: Any) -> Stepper:
    return Stepper(EngineModel(twin(network)), EngineConfig(**config))


def run(stepper: Stepper, *requests: GenerationRequest) -> dict[str, Completion]:
    for asked in requests:
        stepper.add(stepper.accept(asked))
    while stepper.busy:
        stepper.step()
    return {sequence.id: sequence.completion() for sequence in stepper.ended()}


def text(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]
