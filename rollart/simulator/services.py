"""Simulated rewards, a simulated trainer, and a ledger that stores nothing."""

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from rollart.core.errors import RewardFailed
from rollart.core.run_length import RunLength
from rollart.core.seeds import seed_of
from rollart.core.types import (
    Batch,
    Episode,
    Outcome,
    Publication,
    RewardResult,
    Sample,
    SampleGroup,
    StepMetrics,
    Trajectory,
)
from rollart.hardware.devices import DeviceClass
from rollart.hardware.training_time import StepPasses, step_seconds
from rollart.placement.workload import training_setup
from rollart.rollout.groups import Group
from rollart.simulator.distributions import draw_of
from rollart.simulator.scenario import Scenario
from rollart.simulator.weight_transfer import WeightTransfer

_STATE_BYTES = 16  # of a parameter in training: it and its gradient in bfloat16, and three float32 of the optimizer


class SimulatedRewards:
    """`busy_s` are billed seconds of functions, or busy seconds of workers; `calls` and `cold` count calls."""

    def __init__(self, scenario: Scenario) -> None:
        scoring = scenario.simulate.scoring
        self.active = self.calls = self.cold = 0
        self.busy_s = 0.0
        workloads = {task.name: scenario.workload(task.name) for task in scenario.tasks}
        self._tasks = {name: (draw_of(each.reward), each.reward_failures) for name, each in workloads.items()}
        self._retries = scenario.rewards.retries
        self._cold_start = draw_of(scoring.cold_start)
        self._serverless, self._keep_warm = scoring.where == "serverless", scoring.keep_warm
        self._warm: list[float] = []  # expiry times of idle instances, a heap
        self._free = asyncio.Semaphore(scoring.concurrency)

    async def score(self, task: str, episode: Episode) -> RewardResult:
        rng = random.Random(seed_of("reward", episode.id))
        seconds, failures = self._tasks[task]
        for _ in range(self._retries + 1):
            async with self._free:
                await self._call(seconds(rng.random()), rng)
            if rng.random() >= failures:
                return RewardResult(rng.random())
        raise RewardFailed("the simulated reward failed")

    async def _call(self, seconds: float, rng: random.Random) -> None:
        now = asyncio.get_running_loop().time()
        self.calls += 1
        if self._serverless and not self._take_warm(now):
            self.cold += 1
            seconds += self._cold_start(rng.random())
        self.active += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.active -= 1
            ended = asyncio.get_running_loop().time()
            self.busy_s += ended - now
            if self._serverless:
                heapq.heappush(self._warm, ended + self._keep_warm)

    def _take_warm(self, now: float) -> bool:
        while self._warm and self._warm[0] < now:
            heapq.heappop(self._warm)
        if self._warm:
            heapq.heappop(self._warm)
            return True
        return False


def training_seconds(scenario: Scenario, device: DeviceClass, ranks: int) -> Callable[[Sequence[float]], float]:
    """Seconds of a training step by the lengths of its trajectories: by FLOPs and layout, or as measured."""
    shape, pace, constants = scenario.shape, scenario.simulate.train, scenario.simulate.constants
    if pace is not None:
        return lambda lengths: pace.fixed + pace.token * sum(lengths)
    training, setup = scenario.training, training_setup(scenario, device, ranks)
    # Of all but the first mini-batch, logprobs are computed before the first update.
    scored = 1 - 1 / training.updates + (1 if setup.reference else 0) + (1 if setup.critic else 0)
    passes = StepPasses(training.epochs + (training.critic.epochs if setup.critic else 0), scored)
    fixed = 0.0 if device.name == "cpu" else constants.train_fixed_s
    if scenario.simulate.colocated:
        fixed += _STATE_BYTES * shape.parameters / ranks / (constants.switch_rate * 1e9)

    def seconds(lengths: Sequence[float]) -> float:
        return fixed + step_seconds(
            lengths, shape=shape, setup=setup, device=device, passes=passes, efficiency=constants.train_efficiency
        )

    return seconds


class SimulatedTrainer:
    """`work` makes the `seconds` of a step pass. `blocked_s` are seconds that it waited for a weight transfer. Every
    trajectory of a batch stands for `one_in`."""

    def __init__(
        self,
        seconds: Callable[[Sequence[float]], float],
        weights: WeightTransfer,
        work: Callable[[float], Awaitable[None]] = asyncio.sleep,
        one_in: int = 1,
    ) -> None:
        self.version = 0
        self.busy = False
        self.blocked_s = 0.0
        self._seconds, self._weights, self._work, self._one_in = seconds, weights, work, one_in

    async def step(self, batch: Batch) -> StepMetrics:
        clock = asyncio.get_running_loop().time
        lengths = [len(sample.tokens) for group in batch.groups for sample in group.samples] * self._one_in
        if (wait := self._weights.free_at - clock()) > 0:
            await asyncio.sleep(wait)
            self.blocked_s += wait
        self.busy = True
        began = clock()
        await self._work(self._seconds(lengths))
        self.busy = False
        self.version = batch.step + 1
        return StepMetrics(self.version, clock() - began, sum(lengths))

    async def publish(self) -> Publication:
        self._weights.publish(self.version)
        return Publication(self.version)

    async def save(self, path: Path) -> None:
        """Nothing is saved."""

    async def saved(self) -> str:
        return ""


class NullLedger:
    """A ledger for runs that are never resumed."""

    def _ignore(self, *args: Any, **kwargs: Any) -> None: ...

    start = add = lease = drop = quarantine = release = commit = _ignore


def to_samples(group: Group) -> SampleGroup:
    """A group as the simulated trainer needs it: lengths, without tokens."""
    return SampleGroup(group.id, group.task, tuple(map(_sample, group.done)))


def _sample(trajectory: Trajectory) -> Sample:
    tokens = cast(Any, RunLength.of(0, trajectory.total_tokens))
    truncated = trajectory.outcome is Outcome.TRUNCATED
    return Sample(
        id=trajectory.id,
        task=trajectory.task,
        tokens=tokens,
        roles=tokens,
        logprobs=tokens,
        versions=tokens,
        reward=trajectory.reward or 0.0,
        truncated=truncated,
    )
