"""Modelled rewards and a modelled trainer, and a ledger that keeps nothing."""

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, cast

from rollart.core.errors import RewardFailed
from rollart.core.run_length import RunLength
from rollart.core.seeds import seed_of
from rollart.core.types import Batch, Episode, Outcome, RewardResult, Sample, SampleGroup, StepMetrics, Trajectory
from rollart.hardware.devices import DeviceClass
from rollart.hardware.roofline import ModelShape
from rollart.rollout.groups import Group
from rollart.rollout.ledger import GroupRecord
from rollart.simulate.clock import sleep
from rollart.simulate.constants import TRAINING_EFFICIENCY
from rollart.simulate.distributions import draw_of
from rollart.simulate.scenario import Scenario, TrainPace
from rollart.simulate.weights import Weights


class ModelledRewards:
    """`busy_s` is what functions are billed for, or workers spend; `calls` and `cold` count."""

    def __init__(self, scenario: Scenario) -> None:
        scoring = scenario.simulate.scoring
        self.active = self.calls = self.cold = 0
        self.busy_s = 0.0
        self._tasks = {
            task.name: (draw_of(scenario.workload(task.name).reward), scenario.workload(task.name).reward_failures)
            for task in scenario.tasks
        }
        self._retries = scenario.rewards.retries
        self._cold_start = draw_of(scoring.cold_start)
        self._keep_warm = scoring.keep_warm if scoring.where == "serverless" else float("inf")
        self._warm: list[float] = []  # until when each idle instance stays, the soonest first
        self._warm_workers = scoring.where == "dedicated"
        self._free = asyncio.Semaphore(scoring.concurrency)

    async def score(self, task: str, episode: Episode) -> RewardResult:
        luck = random.Random(seed_of("reward", episode.id))
        seconds, failures = self._tasks[task]
        for _ in range(self._retries + 1):
            async with self._free:
                await self._call(seconds(luck.random()), luck)
            if luck.random() >= failures:
                return RewardResult(luck.random())
        raise RewardFailed("the modelled reward failed")

    async def _call(self, seconds: float, luck: random.Random) -> None:
        now = asyncio.get_running_loop().time()
        self.calls += 1
        if not self._warm_workers and not self._take_warm(now):
            self.cold += 1
            seconds += self._cold_start(luck.random())
        self.active += 1
        try:
            await sleep(seconds)
        finally:
            self.active -= 1
            ended = asyncio.get_running_loop().time()
            self.busy_s += ended - now
            if not self._warm_workers:
                heapq.heappush(self._warm, ended + self._keep_warm)

    def _take_warm(self, now: float) -> bool:
        while self._warm and self._warm[0] < now:
            heapq.heappop(self._warm)
        if self._warm:
            heapq.heappop(self._warm)
            return True
        return False


class ModelledTrainer:
    """Time from FLOPs, or as measured. `busy` while it trains, `blocked` while weights are exchanged."""

    def __init__(
        self, shape: ModelShape, device: DeviceClass, ranks: int, weights: Weights, pace: TrainPace | None, epochs: int
    ) -> None:
        self.version = 0
        self.busy = self.blocked = False
        self.blocked_s = 0.0
        self._shape, self._weights, self._pace, self._epochs = shape, weights, pace, epochs
        self._flops = device.tflops * 1e12 * ranks * TRAINING_EFFICIENCY
        self.work: Callable[[float], Awaitable[None]] = sleep

    async def step(self, batch: Batch) -> StepMetrics:
        clock = asyncio.get_running_loop().time
        lengths = [len(sample.tokens) for group in batch.groups for sample in group.samples]
        if (wait := self._weights.free_at - clock()) > 0:
            self.blocked = True
            await sleep(wait)
            self.blocked, self.blocked_s = False, self.blocked_s + wait
        self.busy = True
        began = clock()
        await self.work(self.seconds(lengths))
        self.busy = False
        self.version = batch.step + 1
        return StepMetrics(self.version, clock() - began, sum(lengths))

    def seconds(self, lengths: list[int]) -> float:
        if self._pace is not None:
            return self._pace.fixed + self._pace.token * sum(lengths)
        forward = sum(lengths) * self._shape.token_flops
        forward += self._shape.attention_flops * sum(length * length for length in lengths) / 2
        return 3.0 * self._epochs * forward / self._flops

    async def publish(self) -> int:
        self._weights.publish(self.version)
        return self.version

    async def save(self, path: Path) -> None:
        """Nothing is kept."""

    async def load(self, path: Path) -> None:
        """Nothing was kept."""


class Forgetful:
    """A ledger for runs that nobody will resume."""

    def start(self, group: GroupRecord) -> None: ...

    def add(self, trajectory: Trajectory, *, held_out: bool = False) -> None: ...

    def lease(self, step: int, groups: Iterable[str]) -> None: ...

    def drop(self, group: str, reason: str) -> None: ...

    def leave_out(self, task: str, times: int) -> None: ...

    def take_back(self, task: str) -> None: ...

    def commit(self, version: int) -> None: ...


def counted(group: Group) -> SampleGroup:
    """A group as a modelled trainer needs it: lengths, without the tokens."""
    return SampleGroup(group.id, group.task, tuple(map(_counted, group.done)))


def _counted(trajectory: Trajectory) -> Sample:
    tokens = cast(Any, RunLength.of(0, trajectory.total_tokens))
    truncated = trajectory.outcome is Outcome.TRUNCATED
    return Sample(trajectory.id, trajectory.task, tokens, tokens, tokens, tokens, trajectory.reward or 0.0, truncated)
