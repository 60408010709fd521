"""The critic: a value model on the ranks of the policy, sharded like it, with an optimizer of its own.

It starts as the model that RL starts from, with a head for one number that is 0 at first. A value is that of what came
before an action token; targets are lambda returns (`advantages.tokens.value_targets`). Values are computed before the
step, so that advantages are there when rank 0 deals the batch, and trained on the same micro-batches as the policy.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from rollart.config import TrainingConfig
from rollart.core.column import Column
from rollart.core.types import Batch
from rollart.training.microbatch import MicroBatch
from rollart.training.model_state import TrainedModel
from rollart.training.optimizers import learning_rate, make_optimizer
from rollart.training.packing import pack, split_over_ranks
from rollart.training.ranks import Ranks
from rollart.training.value_models import ValueModel

CRITIC = "critic"


class ValueItem(Struct, frozen=True, array_like=True, gc=False):
    """A sample whose values are wanted: they go to `start` in the values of the batch."""

    start: int
    tokens: Column
    mask: Column


class Critic:
    def __init__(self, folder: Path, ranks: Ranks, config: TrainingConfig) -> None:
        rate = config.critic.lr or config.lr
        self._config = config.model_copy(update={"lora": None, "lr": rate})
        self._ranks = ranks
        self.model = ValueModel(folder, ranks, self._config)
        self.state = TrainedModel(CRITIC, f"{CRITIC}_", self.model, make_optimizer(self.model, self._config))

    @torch.no_grad()
    def values(self, passes: Sequence[Sequence[ValueItem]], size: int) -> NDArray[np.float32]:
        """Of all action tokens of the batch, on all ranks."""
        found = torch.zeros(size, dtype=torch.float64)
        for items in passes:
            with self._ranks.device:
                given = items or [ValueItem(0, Column.ints([0]), Column.flags([0]))]
                packed = pack([item.tokens.array for item in given], [item.mask.array for item in given])
            values = self.model.values(packed).double().cpu()
            places = [np.arange(item.start, item.start + int(item.mask.array.sum())) for item in given]
            found[torch.tensor(np.concatenate(places))] = values
        return np.array(self._ranks.all_reduce(found.tolist()), np.float32)

    def learn(self, step: int, mini_batches: Sequence[Sequence[MicroBatch]]) -> float:
        """Update on every mini-batch, in every epoch. Returns the mean loss before each update."""
        losses = []
        for micros in [*mini_batches] * self._config.critic.epochs:
            rate = learning_rate(self._config, step, self.state.updates)
            total = sum(self._backward(micro) for micro in micros)
            loss, _, finite = self.state.update(total, rate, self._config.grad_clip, self._ranks)
            losses.append(loss)
            if not finite:
                break
        return sum(losses) / max(1, len(losses))

    def _backward(self, micro: MicroBatch) -> float:
        assert micro.value is not None and micro.target is not None and micro.assess is not None
        values = micro.of_targets(self.model.values(micro.packed))
        share = (micro.assess * value_loss(values, micro.value, micro.target, self._config.critic.clip)).sum()
        share.backward()  # type: ignore[no-untyped-call]
        return share.item()


def value_loss(values: Tensor, before: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """Half the squared error of each value. With `clip`, that of the value moved by at most this if it is larger: what
    has moved further towards its target has no gradient."""
    error = (values - targets) ** 2
    if clip is not None:
        error = error.maximum((before + (values - before).clamp(-clip, clip) - targets) ** 2)
    return error / 2


def plan_values(batch: Batch, pack_tokens: int, ranks: int) -> tuple[list[list[list[ValueItem]]], list[int]]:
    """The samples of each rank in each of its passes, and the action tokens of each sample in order."""
    samples = [sample for group in batch.groups for sample in group.samples]
    counts = [sample.actions for sample in samples]
    starts = np.cumsum([0, *counts])
    items = [ValueItem(int(at), s.tokens, Column.flags(s.mask)) for at, s in zip(starts[:-1], samples, strict=True)]
    by_rank = split_over_ranks([len(item.tokens) for item in items], pack_tokens, ranks)
    return [[[items[i] for i in part] for part in passes] for passes in by_rank], counts


def explained_variance(values: NDArray[np.float32], targets: NDArray[np.float32]) -> float:
    """1 - Var(target - value) / Var(target): 1 if the critic knew, 0 if it said nothing, below if it was misled."""
    asked = np.isfinite(targets)
    values, targets = values[asked].astype(np.float64), targets[asked].astype(np.float64)
    spread = targets.var() if len(targets) else 0.0
    return float(1 - (targets - values).var() / spread) if spread > 1e-12 else 0.0
