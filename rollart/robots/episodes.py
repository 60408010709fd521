"""Plays episodes with a policy: it lives in this process, and acts for all environments that wait for it at once.

Invariants: an episode's noise depends on its seed alone, not on the others that share a batch; an environment that
fails is counted apart, never as a failure of the policy; an action that is not finite never reaches an environment.
"""

import asyncio
import base64
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rollart.config import TaskConfig
from rollart.core.errors import EnvironmentFailed, RollartError
from rollart.core.protocols import ClaimedEnvironment, EnvironmentPool
from rollart.core.seeds import seed_of
from rollart.core.types import Message
from rollart.robots.learner import Proposal, TrainedPolicy
from rollart.workers.batching import Batcher

MAX_ROWS = 256


class PolicyDiverged(RollartError):
    """The policy's actions are not finite."""


@dataclass(frozen=True, slots=True)
class RobotEpisode:
    """`failure`: why the environment could not play it; empty: it did. `video` is an animated GIF, if it was filmed."""

    seed: int
    success: bool
    steps: int
    reward: float
    failure: str = ""
    video: bytes = b""


class Explorer(Protocol):
    """Chooses the chunks of an episode in place of the policy, and keeps what it was shown."""

    def disturbed(self, history: Tensor) -> Tensor:
        """What the policy is shown in place of the observations [history, O]."""
        ...

    def choose(self, seen: Tensor, proposal: Proposal, step: int) -> int:
        """Which candidate to execute after the observation `seen` [O]; `step`: of the policy that proposes them."""
        ...

    def observe(self, commands: Tensor, seen: Tensor) -> None:
        """The commands that were executed, and what they led to, [at most execute, A] and [.., O]."""
        ...


class BatchedPolicy:
    """One network pass for all that wait; `policy` may be replaced between two. `latencies` are seconds per pass."""

    def __init__(self, policy: TrainedPolicy) -> None:
        torch.set_num_threads(1)  # a pass takes less time than two threads need to meet, more so on a busy machine
        self.policy = policy
        self.latencies: list[float] = []
        self._batcher: Batcher[tuple[Tensor, Tensor], tuple[Proposal, int]] = Batcher(self._propose, lambda: MAX_ROWS)

    async def propose(self, history: Tensor, noise: Tensor) -> tuple[Proposal, int]:
        """[history, O] and noise to candidates [K, D], and the step of the policy that made them."""
        return await self._batcher.call((history, noise))

    async def _propose(self, waiting: Sequence[tuple[Tensor, Tensor]]) -> Sequence[tuple[Proposal, int] | Exception]:
        histories, noise = (torch.stack(rows) for rows in zip(*waiting, strict=True))
        began = time.perf_counter()
        made = self.policy.propose(histories, noise)
        self.latencies.append(time.perf_counter() - began)
        rows = zip(made.condition, made.candidates, made.scores, strict=True)
        return [(Proposal(*row), self.policy.step) for row in rows]


@dataclass(frozen=True, slots=True)
class RobotScore:
    """Held-out episodes of one policy. `latency_ms` are the median and the 99th percentile per chunk."""

    episodes: tuple[RobotEpisode, ...]
    latency_ms: tuple[float, float] = field(default=(0.0, 0.0))

    @property
    def played(self) -> list[RobotEpisode]:
        return [one for one in self.episodes if not one.failure]

    @property
    def success(self) -> float:
        return sum(one.success for one in self.played) / max(1, len(self.played))


async def evaluate(
    policy: TrainedPolicy, pool: EnvironmentPool, task: TaskConfig, *, episodes: int, seed: int, parallel: int
) -> RobotScore:
    """Held-out episodes, `parallel` at a time. Raises RollartError if the environment could not play a single one, and
    PolicyDiverged."""
    acting, room = BatchedPolicy(policy), asyncio.Semaphore(parallel)
    _warm_up(policy)

    async def held_out(number: int) -> RobotEpisode:
        async with room:
            return await _episode(acting, pool, task, seed_of(seed, task.name, "held out", number))

    try:
        async with asyncio.TaskGroup() as group:
            playing = [group.create_task(held_out(number)) for number in range(episodes)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    found = RobotScore(tuple(one.result() for one in playing), _milliseconds(acting.latencies))
    if not found.played:
        raise RollartError(f"no episode of {task.name} could be played; the last: {found.episodes[-1].failure}")
    return found


def _warm_up(policy: TrainedPolicy) -> None:
    """The first pass of a process takes longer than any other."""
    policy.act(torch.zeros(1, policy.config.control.history, policy.observations), torch.zeros(1, policy.noise_size))


async def _episode(acting: BatchedPolicy, pool: EnvironmentPool, task: TaskConfig, seed: int) -> RobotEpisode:
    try:
        async with pool.claim(task.name, held_out=True) as env:
            return await play(acting, env, task, seed, noise_seed=seed_of(seed, "noise"))
    except EnvironmentFailed as error:
        return RobotEpisode(seed, success=False, steps=0, reward=0.0, failure=str(error))


async def play(
    acting: BatchedPolicy,
    env: ClaimedEnvironment,
    task: TaskConfig,
    seed: int,
    *,
    noise_seed: int,
    explorer: Explorer | None = None,
) -> RobotEpisode:
    """Raises EnvironmentFailed and PolicyDiverged."""
    control = acting.policy.config.control
    noise = torch.Generator().manual_seed(noise_seed)
    seen = _observations(await env.reset(seed), acting.policy, task)
    history = seen[-1:].repeat(control.history, 1)
    reward = 0.0
    while True:
        latent = torch.randn(acting.policy.noise_size, generator=noise)
        shown = history if explorer is None else explorer.disturbed(history)
        proposal, made = await acting.propose(shown, latent)
        chosen = int(proposal.scores.argmax()) if explorer is None else explorer.choose(history[-1], proposal, made)
        chunk = acting.policy.commands(proposal.candidates[chosen])[: control.execute]
        if not chunk.isfinite().all():
            raise PolicyDiverged(
                f"the policy's actions in episode {seed} of {task.name} are not finite numbers; "
                "train it again with a lower learning rate"
            )
        step = await env.step(json.dumps(chunk.tolist()))
        reward += step.reward or 0.0
        seen = _observations(step.messages, acting.policy, task)
        if explorer is not None:
            explorer.observe(chunk[: len(seen)], seen)
        if step.done:
            video = base64.b64decode(step.info.get("video", ""))
            success, steps = bool(step.info["success"]), int(step.info["steps"])
            return RobotEpisode(seed, success, steps, reward, video=video)
        history = torch.cat([history, seen])[-control.history :]


def _observations(messages: Sequence[Message], policy: TrainedPolicy, task: TaskConfig) -> Tensor:
    seen = torch.tensor(json.loads(messages[-1].content), dtype=torch.float32)
    if seen.shape[-1] != policy.observations:
        raise RollartError(
            f"{task.name} observes {seen.shape[-1]} numbers, but the policy of {policy.task} knows "
            f"{policy.observations}; evaluate it on the task that it was trained for"
        )
    return seen


def _milliseconds(latencies: Sequence[float]) -> tuple[float, float]:
    if len(latencies) < 2:
        return (1e3 * sum(latencies),) * 2
    return 1e3 * statistics.median(latencies), 1e3 * statistics.quantiles(latencies, n=100)[-1]
