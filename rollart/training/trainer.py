"""The trainer: one policy, one `step` per batch. Plain and synchronous; the service gives it a thread.

It is rank 0, and only it knows of batches, tasks, versions and files. The same batches give the same weights. A step
with nothing to learn from, or with a loss or gradient that is not finite, leaves the weights alone and warns; the
version advances all the same, because the batch has been used.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
from torch import Tensor

from rollart.config import TrainingConfig
from rollart.core.errors import RollartError
from rollart.core.types import Batch, ExampleBatch, StepMetrics
from rollart.training.advantages import ADVANTAGES, UNSEEN, RewardRange, token_advantages
from rollart.training.guard import Guard, coarser
from rollart.training.learner import (
    Gather,
    Heartbeat,
    Imitate,
    Learn,
    Learner,
    MiniBatch,
    Publish,
    Restore,
    Save,
    Shutdown,
    Verify,
)
from rollart.training.logprob_gap import Cells, gap_table
from rollart.training.losses import LOSSES, Traits
from rollart.training.metrics import StepTotals, task_metrics
from rollart.training.microbatch import Advantages, check_batch, plan_examples, plan_passes, split_into_mini_batches
from rollart.training.ranks import Ranks
from rollart.weights.publish import Publisher, tensor_digests

_Digests = dict[str, list[tuple[int, int]]]
IMITATION_VALUES = ("loss", "grad_norm", "lr", "skipped")


class Trainer:
    """`folder` is the Hugging Face model that RL starts from, and the reference of the KL if `kl` is set.
    `engine_dtype` limits how closely the engine's logprobs can agree with the trainer's."""

    def __init__(
        self,
        folder: Path,
        config: TrainingConfig,
        *,
        seed: int = 0,
        version: int = 0,
        ranks: Ranks | None = None,
        engine_dtype: str = "float32",
        publisher: Publisher | None = None,
    ) -> None:
        self.config, self.version = config, version
        self._advantage = ADVANTAGES.find(config.algorithm.advantage)
        self._pairs = LOSSES.find(config.algorithm.loss) in Traits.of_pairs
        self.ranges: dict[str, RewardRange] = {}
        self.ranks = ranks or Ranks.single()
        self.learner = Learner(folder, config, self.ranks, seed, publisher)
        own = "tf32" if config.dtype == "float32" and self.ranks.device.type == "cuda" else config.dtype
        self.guard = Guard(coarser(engine_dtype, own))
        self.saving: Future[None] | None = None  # the newest checkpoint

    def step(self, batch: Batch) -> StepMetrics:
        self._check_version(batch.step)
        check_batch(batch)
        began = time.perf_counter()
        for group in batch.groups:
            seen = self.ranges.get(group.task, UNSEEN)
            self.ranges[group.task] = seen.including(list(group.rewards.values()))
        ranges = [self.ranges[group.task] for group in batch.groups]
        advantages, solved = token_advantages(self._advantage, batch, ranges, self.config.algorithm)
        cells = Cells(batch.step)
        orders = self._orders(batch, advantages, solved, cells)
        with self.ranks.dispatch(orders):
            totals = self.learner.learn(orders[0])
        self.version += 1
        rows = cells.rows(totals.gaps)
        return StepMetrics(
            version=self.version,
            seconds=time.perf_counter() - began,
            tokens=sum(len(sample.tokens) for group in batch.groups for sample in group.samples),
            values=totals.values(),
            tasks={} if self._pairs else task_metrics(batch, solved),
            gaps=() if self._pairs else gap_table(rows),
            warnings=(*self.guard.check(batch.step, rows), *self._skipped(totals)),
        )

    def imitate(self, batch: ExampleBatch) -> StepMetrics:
        """A supervised step: cross entropy on the trained tokens, at the rate of the batch."""
        self._check_version(batch.step)
        began, layout = time.perf_counter(), self.ranks.layout
        trained = sum(sum(example.mask) for example in batch.examples)
        if not trained:
            raise ValueError(f"the examples of step {batch.step} have no token whose mask is 1")
        by_rank = plan_examples(batch.examples, self.config.pack_tokens, layout.data)
        shares = [Imitate(passes, batch.rate, 1 / trained) for passes in by_rank]
        orders = [shares[layout.data_index(rank)] for rank in range(layout.ranks)]
        with self.ranks.dispatch(orders):
            totals = self.learner.imitate(orders[0])
        self.version += 1
        return StepMetrics(
            version=self.version,
            seconds=time.perf_counter() - began,
            tokens=sum(len(example.tokens) for example in batch.examples),
            values={name: value for name, value in totals.values().items() if name in IMITATION_VALUES},
            warnings=self._skipped(totals),
        )

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """The version and a copy of its weights. Tied weights share one copy."""
        weights = self.gather()
        if self.ranks.size == 1:
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        return self.version, self.learner.policy.state_dict(weights)

    def publish(self, id: str) -> tuple[int, dict[str, str]]:
        """Write the current version to the weight store. Returns it, and a digest of each tensor."""
        order = Publish(self.version, id)
        with self.ranks.dispatch([order] * self.ranks.size):
            self.learner.publish(order)
            shards = [msgspec.json.decode(digests, type=_Digests) for digests in self.ranks.collect(order.id)]
        return self.version, tensor_digests(shards)

    @property
    def model_bytes(self) -> int:
        policy = self.learner.policy
        return sum(each.numel() * each.element_size() for each in (policy.parameters() | policy.buffers()).values())

    def gather(self) -> dict[str, Tensor]:
        """The weights of all ranks, by parameter name. Those of a single rank are not copies."""
        with self.ranks.dispatch([Gather()] * self.ranks.size):
            return self.learner.gather()

    def save(self, order: Save) -> None:
        with self.ranks.dispatch([order] * self.ranks.size):
            self.learner.save(order)

    def verify(self, order: Verify) -> list[str]:
        """What the ranks found damaged."""
        with self.ranks.dispatch([order] * self.ranks.size):
            self.learner.verify(order)
            return [fault for fault in self.ranks.collect(order.id) if fault]

    def restore(self, order: Restore) -> None:
        with self.ranks.dispatch([order] * self.ranks.size):
            self.learner.restore(order)

    def notify(self, order: Heartbeat | Shutdown) -> None:
        """Orders without a part for rank 0. Raises RanksLost if another rank is gone."""
        with self.ranks.dispatch([order] * self.ranks.size):
            pass

    def _check_version(self, step: int) -> None:
        if step != self.version:
            raise RollartError(f"the batch is for version {step}, but the trainer is at version {self.version}")

    def _skipped(self, totals: StepTotals) -> tuple[str, ...]:
        if not totals.skipped:
            return ()
        made = totals.values()["updates"]
        done = f"stopped after {made:g} updates" if made else "left the weights alone"
        return (f"step {self.version} {done}: its loss or gradient is not finite",)

    def _orders(self, batch: Batch, advantages: Advantages, solved: Sequence[bool], cells: Cells) -> list[Learn]:
        """What each rank learns in an epoch. Each mini-batch is weighted and dealt over the ranks like a batch."""
        algorithm, layout = self.config.algorithm, self.ranks.layout
        loss = LOSSES.find(algorithm.loss)
        keep_all = algorithm.kl > 0 or algorithm.entropy > 0 or loss in Traits.every_sample
        by_rank: list[list[MiniBatch]] = [[] for _ in range(layout.data)]
        for members in split_into_mini_batches(batch, advantages, self.config.updates, keep_all=keep_all):
            passes = plan_passes(
                replace(batch, groups=tuple(batch.groups[i] for i in members)),
                [advantages[i] for i in members],
                cells,
                aggregate=algorithm.aggregate,
                pack_tokens=self.config.pack_tokens,
                keep_all=keep_all,
                ranks=layout.data,
                share=self.learner.policy.shares_prompts,
                pairs=self._pairs,
            )
            # Adam takes a full-sized step however small the gradient; what has little evidence should move little.
            telling = fmean(any(row.any() for row in advantages[i]) and not solved[i] for i in members)
            evidence = telling**algorithm.evidence_power
            for mine, part in zip(by_rank, passes, strict=True):
                mine.extend([MiniBatch(part, evidence)] if part else [])
        return [Learn(batch.step, by_rank[layout.data_index(rank)], len(cells)) for rank in range(layout.ranks)]
