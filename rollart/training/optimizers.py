"""Optimizers and learning-rate schedules, by name.

`adamw` is torch's fused AdamW. The others treat matrices in a way of their own, and leave the rest to it:

- `muon` orthogonalises the momentum of each matrix; embeddings and the output head stay with AdamW. Half the state.
- `adamw_8bit` keeps both moments of every matrix in 8 bits. A quarter of the state.

An optimizer is added by writing a function here under `@OPTIMIZERS.register`. `rollart check` reads the registry, so
this module does not import torch, and its functions do only when they are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rollart.config import TrainingConfig
from rollart.training.registry import Registry

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rollart.training.strategy import Strategy

OptimizerFactory = Callable[["Strategy", TrainingConfig], "Optimizer"]
OPTIMIZERS: Registry[OptimizerFactory] = Registry("training.optimizer")


@OPTIMIZERS.register
def adamw(policy: Strategy, config: TrainingConfig) -> Optimizer:
    from rollart.training.matrix_optimizers import decay_groups, plain_adamw

    return plain_adamw(decay_groups(list(policy.parameters().values()), config), config)


@OPTIMIZERS.register
def muon(policy: Strategy, config: TrainingConfig) -> Optimizer:
    from rollart.training.matrix_optimizers import Muon, is_matrix

    parameters, embeddings = policy.parameters(), policy.embeddings()
    matrices = [p for name, p in parameters.items() if name not in embeddings and is_matrix(p)]
    return Muon(matrices, list(parameters.values()), config)


@OPTIMIZERS.register
def adamw_8bit(policy: Strategy, config: TrainingConfig) -> Optimizer:
    from rollart.training.matrix_optimizers import AdamW8bit

    parameters = list(policy.parameters().values())
    return AdamW8bit([p for p in parameters if p.ndim > 1], parameters, config)


def make_optimizer(policy: Strategy, config: TrainingConfig) -> Optimizer:
    """Raises ConfigError if there is none of that name."""
    return OPTIMIZERS.find(config.optimizer)(policy, config)


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1 - progress


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


SCHEDULES = {"constant": _constant, "linear": _linear, "cosine": _cosine}


def learning_rate(config: TrainingConfig, step: int, updates: int) -> float:
    """Of the next update, in a step of the run after `updates` so far. Steps and updates number from 0.

    >>> config = TrainingConfig(steps=5, lr=1.0, lr_schedule="cosine", lr_end=0.2, lr_warmup=2)
    >>> [round(learning_rate(config, step, updates=2 * step), 3) for step in range(5)]
    [0.5, 0.883, 0.6, 0.317, 0.2]
    """
    left = SCHEDULES[config.lr_schedule](min(1.0, step / max(1, config.steps - 1)))
    end = config.lr_end or 0.0
    warm = min(1.0, (updates + 1) / max(1, config.lr_warmup))
    return config.lr * (end + (1 - end) * left) * warm
