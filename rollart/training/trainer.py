"""The trainer: one policy, one `step` per batch. Plain and synchronous; the service gives it a thread.

It is rank 0, and only it knows of batches, tasks, versions and files. The same batches give the same weights. A step
with nothing to learn from, or with a loss or gradient that is not finite, leaves the weights alone and warns; the
version advances all the same, because the batch has been used.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.errors import RollartError
from rollart.core.types import Batch, ExampleBatch, StepMetrics
from rollart.training.advantages import UNSEEN, Assessed, RewardRange, token_advantages, token_targets
from rollart.training.algorithms import Algorithm
from rollart.training.critic import explained_variance, plan_values
from rollart.training.guard import REPEAT_STEPS, Guard, coarser
from rollart.training.learner import (
    Assess,
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
from rollart.training.metrics import PER_PAIR, StepTotals, task_metrics
from rollart.training.microbatch import (
    Advantages,
    check_batch,
    plan_examples,
    plan_passes,
    split_into_mini_batches,
)
from rollart.training.ranks import Ranks
from rollart.weights.publish import Publisher, tensor_digests

_Digests = dict[str, list[tuple[int, int]]]
FLAT_STEP = 2  # of every REPEAT_STEPS: whether rewards differ at all
IMITATION_VALUES = ("loss", "grad_norm", "lr", "skipped")


class Trainer:
    """`folder` is the Hugging Face model that RL starts from, and the reference of the KL if `kl` is set.
    `engine_dtype` limits how closely the engine's logprobs can agree with the trainer's. `tasks` are the algorithms of
    those that have one of their own."""

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
        tasks: Mapping[str, AlgorithmConfig] | None = None,
    ) -> None:
        self.config, self.version = config, version
        self.ranges: dict[str, RewardRange] = {}
        self.ranks = ranks or Ranks.single()
        self.learner = Learner(folder, config, self.ranks, seed, publisher, tasks)
        self._algorithms = self.learner.algorithms
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
        assessed = self._assess(batch)
        advantages, solved = self._advantages(batch, assessed)
        cells = Cells(batch.step)
        orders = self._orders(batch, advantages, solved, cells, assessed)
        with self.ranks.dispatch(orders):
            totals = self.learner.learn(orders[0])
        self.version += 1
        rows = cells.rows(totals.gaps)
        return StepMetrics(
            version=self.version,
            seconds=time.perf_counter() - began,
            tokens=sum(len(sample.tokens) for group in batch.groups for sample in group.samples),
            values=totals.values() | _critic_values(assessed),
            tasks={} if self._algorithms.of_pairs else task_metrics(batch, solved, totals.of_tasks(cells)),
            gaps=() if self._algorithms.of_pairs else gap_table(rows),
            warnings=(
                *self.guard.check(batch.step, rows, _rewards(batch)),
                *self._skipped(totals),
                *self._flat_rewards(batch),
            ),
        )

    def compare(self, batch: Batch) -> dict[str, float]:
        """How many pairs are ranked as they should be, and by how much. Nothing is learnt."""
        check_batch(batch)
        advantages, solved = self._advantages(batch, None)
        cells = Cells(batch.step)
        orders = [
            msgspec.structs.replace(one, update=False) for one in self._orders(batch, advantages, solved, cells, None)
        ]
        with self.ranks.dispatch(orders):
            totals = self.learner.learn(orders[0])
        return {name: value for name, value in totals.values().items() if name in PER_PAIR}

    def imitate(self, batch: ExampleBatch) -> StepMetrics:
        """A supervised step: cross entropy on the trained tokens, at the rate of the batch."""
        self._check_version(batch.step)
        began = time.perf_counter()
        trained = sum(sum(example.mask) for example in batch.examples)
        if not trained:
            raise ValueError(f"the examples of step {batch.step} have no token whose mask is 1")
        by_share = plan_examples(batch.examples, self.config.pack_tokens, self.ranks.layout.data)
        orders = [Imitate(passes, batch.rate, 1 / trained) for passes in by_share]
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
        with self.ranks.command(order):
            self.learner.publish(order)
            shards = [msgspec.json.decode(digests, type=_Digests) for digests in self.ranks.collect(order.id)]
        return self.version, tensor_digests(shards)

    @cached_property
    def model_bytes(self) -> int:
        policy = self.learner.policy
        return sum(each.numel() * each.element_size() for each in (policy.parameters() | policy.buffers()).values())

    def gather(self) -> dict[str, Tensor]:
        """The weights of all ranks, by parameter name. Those of a single rank are not copies."""
        with self.ranks.command(Gather()):
            return self.learner.gather()

    def save(self, order: Save) -> None:
        with self.ranks.command(order):
            self.learner.save(order)

    def verify(self, order: Verify) -> list[str]:
        """What the ranks found damaged."""
        with self.ranks.command(order):
            self.learner.verify(order)
            return [fault for fault in self.ranks.collect(order.id) if fault]

    def restore(self, order: Restore) -> None:
        with self.ranks.command(order):
            self.learner.restore(order)

    def notify(self, order: Heartbeat | Shutdown) -> None:
        """Orders without a part for rank 0. Raises RanksLost if another rank is gone."""
        with self.ranks.command(order):
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

    def _flat_rewards(self, batch: Batch) -> Iterator[str]:
        """Early in a run, and again while it lasts: a reward that nothing earns teaches nothing."""
        if batch.step % REPEAT_STEPS != FLAT_STEP or self._algorithms.of_pairs:
            return
        others = {sample.task for group in batch.groups for sample in group.samples if sample.teacher or sample.imitate}
        for task in sorted({group.task for group in batch.groups} - others):
            if (seen := self.ranges[task]).low == seen.high:
                yield (
                    f"all trajectories of task {task} got the same reward so far, {seen.low:g}, so there is nothing "
                    "to learn from it: read some with `rollart trajectory RUN_DIR`"
                )

    def _by_algorithm(self, batch: Batch) -> Iterator[tuple[Algorithm, list[int], Batch]]:
        """Each one that has groups in the batch, their places, and a batch of them alone."""
        numbers = [self._algorithms.number(group.task) for group in batch.groups]
        for number, algorithm in enumerate(self._algorithms.all):
            if chosen := [i for i, each in enumerate(numbers) if each == number]:
                yield algorithm, chosen, replace(batch, groups=tuple(batch.groups[i] for i in chosen))

    def _advantages(self, batch: Batch, assessed: Assessed | None) -> tuple[Advantages, list[bool]]:
        """Of every group in its place, and whether it is solved."""
        advantages: dict[int, Sequence[NDArray[np.float32]]] = {}
        solved: dict[int, bool] = {}
        for algorithm, chosen, part in self._by_algorithm(batch):
            ranges = [self.ranges.get(group.task, UNSEEN) for group in part.groups]
            values = None if assessed is None else assessed.of(chosen).values
            found = token_advantages(algorithm.advantage, part, ranges, algorithm.config, values)
            advantages |= zip(chosen, found[0], strict=True)
            solved |= zip(chosen, found[1], strict=True)
        return [advantages[i] for i in range(len(batch.groups))], [solved[i] for i in range(len(batch.groups))]

    def _assess(self, batch: Batch) -> Assessed | None:
        """What the critic says of the batch, and what it should say, if there is one: it is not asked about tasks whose
        algorithm needs none."""
        if self.learner.critic is None:
            return None
        by_share, counts = plan_values(batch, self.config.pack_tokens, self.ranks.layout.data)
        orders = [Assess(passes, sum(counts)) for passes in by_share]
        with self.ranks.dispatch(orders):
            rows = iter(np.split(self.learner.assess(orders[0]), np.cumsum(counts)[:-1]))
        values = [[next(rows) for _ in group.samples] for group in batch.groups]
        targets = [[np.full_like(row, np.nan) for row in rows] for rows in values]
        for algorithm, chosen, part in self._by_algorithm(batch):
            if algorithm.needs_critic:
                found = token_targets(part, algorithm.config, [values[i] for i in chosen])
                for i, rows_of_group in zip(chosen, found, strict=True):
                    targets[i] = rows_of_group
        return Assessed(values, targets)

    def _orders(
        self,
        batch: Batch,
        advantages: Advantages,
        solved: Sequence[bool],
        cells: Cells,
        assessed: Assessed | None,
    ) -> list[Learn]:
        """What the ranks of each share of the data learn in an epoch. Each mini-batch is weighted and dealt over the
        shares like a batch."""
        shares, power = self.ranks.layout.data, self.config.algorithm.evidence_power
        by_share: list[list[MiniBatch]] = [[] for _ in range(shares)]
        for members in split_into_mini_batches(batch, advantages, self.config.updates, self._algorithms):
            passes = plan_passes(
                replace(batch, groups=tuple(batch.groups[i] for i in members)),
                [advantages[i] for i in members],
                cells,
                algorithms=self._algorithms,
                pack_tokens=self.config.pack_tokens,
                ranks=shares,
                share=self.learner.policy.shares_prompts,
                pairs=self._algorithms.of_pairs,
                assessed=None if assessed is None else assessed.of(members),
            )
            # Adam takes a full-sized step however small the gradient; what has little evidence should move little.
            taught = [self._algorithms.of(batch.groups[i].task).of_teacher for i in members]
            telling = fmean(
                taught[n] or (any(row.any() for row in advantages[i]) and not solved[i]) for n, i in enumerate(members)
            )
            evidence = telling**power
            for mine, part in zip(by_share, passes, strict=True):
                mine.extend([MiniBatch(part, evidence)] if part else [])
        policy = assessed is None or batch.step >= self.config.critic.warmup
        return [Learn(batch.step, mine, len(cells), policy) for mine in by_share]


def _rewards(batch: Batch) -> dict[str, float]:
    """The mean of each task."""
    found: dict[str, list[float]] = {}
    for group in batch.groups:
        found.setdefault(group.task, []).extend(group.rewards.values())
    return {task: fmean(values) for task, values in found.items() if values}


def _critic_values(assessed: Assessed | None) -> dict[str, float]:
    """How much the critic knew before the step."""
    if assessed is None:
        return {}
    values, targets = (
        np.concatenate([row for rows in each for row in rows]) for each in (assessed.values, assessed.targets)
    )
    return {"explained_variance": explained_variance(values, targets)}
