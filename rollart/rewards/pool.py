"""Rewards as calls to elastic local processes: started when an episode waits, gone when none has come for a while."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollart.config import Rewards, Task
from rollart.errors import RewardFailed, ServiceError
from rollart.types import Episode, RewardResult
from rollart.workers.process import HostSpec
from rollart.workers.slot import CallRaised, SlotLost
from rollart.workers.slots import SlotPool

SHIM = "{rollart}/rewards/shim.py:RewardShim"
BACK_OFF_S = 0.1
IDLE_S = 30.0


class RewardPool:
    """Implements `rollart.protocols.RewardInvoker`. What rewards print goes to `log`, if given."""

    def __init__(self, tasks: Sequence[Task], config: Rewards, log: Path | None = None, idle_s: float = IDLE_S) -> None:
        self._config = config
        self._rewards = {task.name: task.reward for task in tasks}
        functions = tuple(dict.fromkeys(self._rewards.values()))
        self._pool = SlotPool(HostSpec(SHIM, functions, log=log, name="host of rewards"), config.workers, idle_s)

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

    async def score(self, task: str, episode: Episode) -> RewardResult:
        """Raises RewardFailed after the last retry, each on a fresh process."""
        reward, deadline, tries = self._rewards[task], self._config.deadline, self._config.retries + 1
        args = {"reward": reward, "episode": episode}
        for number in range(tries):
            try:
                async with self._pool.lease() as lease:
                    await lease.take(fresh=number > 0)
                    try:
                        return msgspec.convert(await lease.call("score", args, deadline), RewardResult)
                    except CallRaised:
                        lease.drop()  # what raised once may have left its process in a bad state
                        raise
            except (SlotLost, CallRaised, ServiceError, msgspec.ValidationError) as error:
                failure = error
            if number + 1 < tries:
                await asyncio.sleep(BACK_OFF_S * 2**number)
        raise RewardFailed(
            f"the reward {reward!r} of task {task!r} failed {tries} times; the last time: {failure}"
        ) from failure
