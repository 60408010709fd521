"""Rewards in local processes, started on demand and stopped when idle."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollart.config import RewardsConfig, TaskConfig
from rollart.core.errors import RewardFailed, ServiceError
from rollart.core.types import Episode, RewardResult
from rollart.rewards.caller import CallUsage
from rollart.workers.host_handle import HostSpec
from rollart.workers.pool import ProcessClaim, ProcessPool
from rollart.workers.worker_process import CallRaised, ProcessLost

BACKOFF_S = 0.1
IDLE_S = 30.0


class RewardPool:
    """Implements `rollart.core.protocols.RewardInvoker`. What rewards print goes to `log`, if given."""

    def __init__(
        self, tasks: Sequence[TaskConfig], config: RewardsConfig, log: Path | None = None, idle_s: float = IDLE_S
    ) -> None:
        self._config = config
        self._rewards = {task.name: task.reward for task in tasks}
        self._limits = {task.name: asyncio.Semaphore(task.reward.concurrency) for task in tasks}
        functions = tuple(dict.fromkeys(reward.function for reward in self._rewards.values()))
        spec = HostSpec("rollart.rewards.runtime:RewardWorker", functions, log=log, name="host of rewards")
        self._pool = ProcessPool(spec, config.workers, idle_s=idle_s)

    @property
    def in_use(self) -> int:
        return self._pool.in_use

    @property
    def processes(self) -> int:
        """0 when nothing has been scored for a while."""
        return self._pool.processes

    async def start(self) -> None:
        """Raises ServiceError, for example for a function that cannot be imported."""
        try:
            await self._pool.start()
        except ServiceError as error:
            raise ServiceError(f"the rewards cannot start: {error}") from error

    async def close(self) -> None:
        await self._pool.close()

    async def score(self, task: str, episode: Episode, usage: CallUsage | None = None) -> RewardResult:
        """Raises RewardFailed after the last retry, each on a fresh process."""
        usage, reward = usage or CallUsage(), self._rewards[task]
        tries = 1 + (self._config.retries if reward.retries is None else reward.retries)
        args = {"reward": reward.function, "episode": episode, "args": reward.args, "version": reward.version}
        for number in range(tries):
            try:
                async with self._limits[task], self._pool.claim() as claim:
                    return await _call(claim, args, reward.deadline or self._config.deadline, usage)
            except (ProcessLost, CallRaised, ServiceError, msgspec.ValidationError) as error:
                failure = error
            if number + 1 < tries:
                await asyncio.sleep(BACKOFF_S * 2**number)
        raise RewardFailed(
            f"the reward {reward.function!r} of task {task!r} failed {tries} times; the last time: {failure}"
        ) from failure


async def _call(claim: ProcessClaim, args: dict[str, Any], deadline: float, usage: CallUsage) -> RewardResult:
    """One attempt; a retry gets a fresh process. Raises ProcessLost or CallRaised."""
    clock = asyncio.get_running_loop().time
    began = clock()
    await claim.acquire(fresh=usage.tries > 0)
    usage.tries += 1
    usage.cold = usage.cold or not claim.used
    taken = clock()
    try:
        return msgspec.convert(await claim.call("score", args, deadline), RewardResult)
    except CallRaised:
        claim.kill()  # what raised once may have left its process in a bad state
        raise
    finally:
        usage.first_byte_s = clock() - began
        usage.billed_s += clock() - taken
