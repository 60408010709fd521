"""Rewards in local processes, started on demand and stopped when idle.

Invariants: episodes that wait at the same time are scored in one call, as many as the function scores within `BATCH_S`;
what a batch cannot answer, because its process hung or an episode before raised, is scored alone, which costs no try.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollart.config import RewardsConfig, TaskConfig
from rollart.core.errors import RewardFailed, RollartError, ServiceError
from rollart.core.foreign import InvalidValue, is_bug
from rollart.core.types import Episode, RewardResult
from rollart.rewards.caller import CallUsage
from rollart.rewards.wire import received
from rollart.workers.batching import Batcher
from rollart.workers.host_handle import HostSpec
from rollart.workers.pool import ProcessClaim, ProcessPool
from rollart.workers.worker_process import CallRaised, ProcessLost

BACKOFF_S = 0.1
IDLE_S = 30.0
BATCH_S = 0.05
MAX_BATCH = 64


_FAILURES = (ProcessLost, CallRaised, ServiceError, InvalidValue)


class BatchLost(RollartError):
    """The batch gave no result for this episode; `own` if that is its own fault."""

    def __init__(self, failure: Exception, own: bool) -> None:
        super().__init__(str(failure))
        self.failure, self.own = failure, own


class RewardPool:
    """Implements `rollart.core.protocols.RewardInvoker`. What rewards print goes to `log`, if given."""

    def __init__(
        self, tasks: Sequence[TaskConfig], config: RewardsConfig, log: Path | None = None, idle_s: float = IDLE_S
    ) -> None:
        self._config = config
        self._rewards = {task.name: task.reward for task in tasks}
        self._limits = {task.name: asyncio.Semaphore(task.reward.concurrency) for task in tasks}
        self._batches = {task.name: _Batches(self, task.name) for task in tasks}
        functions = tuple(dict.fromkeys(reward.function for reward in self._rewards.values()))
        names = tuple(dict.fromkeys(name for reward in self._rewards.values() for name in reward.pass_env))
        target = "rollart.rewards.runtime:RewardWorker"
        spec = HostSpec(target, functions, log=log, name="host of rewards", pass_env=names, limits=config.limits)
        self._pool = ProcessPool(spec, config.workers, idle_s=idle_s)

    def workers(self, task: str) -> int:
        """Processes that score episodes of the task at the same time, at most."""
        return min(self._config.workers, self._rewards[task].concurrency)

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
        """Raises RewardFailed after the last retry, each on a fresh process; a bug is not tried again."""
        usage = usage or CallUsage()
        try:
            scored = await self._batches[task].batcher.call(episode)
        except BatchLost as lost:
            failure, usage.tries = lost.failure, int(lost.own)
            return (await self._score_fresh(task, [episode], usage, failure))[0]
        usage.tries, usage.cold = 1, scored.cold
        usage.first_byte_s, usage.billed_s = scored.first_byte_s, scored.billed_s
        return scored.result

    async def score_batch(self, task: str, episodes: Sequence[Episode]) -> list["_Scored | Exception"]:
        """One call. What has no result gets BatchLost."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with self._pool.claim() as claim:
                await claim.acquire()
                cold, taken = not claim.used, clock()
                results, failure = await self._call(claim, task, episodes)
        except _FAILURES as error:
            raise BatchLost(error, own=len(episodes) == 1) from error
        billed = self._batches[task].seconds = (clock() - taken) / len(episodes)
        scored: list[_Scored | Exception] = [_Scored(each, cold, clock() - began, billed) for each in results]
        failure = failure or CallRaised("it returned fewer results than it got episodes")
        return scored + [BatchLost(failure, own=n == 0) for n in range(len(episodes) - len(scored))]

    async def score_group(self, task: str, episodes: Sequence[Episode], usage: CallUsage) -> list[RewardResult]:
        """All in one call of a function that compares them. Raises RewardFailed, which is then that of all."""
        return await self._score_fresh(task, episodes, usage, None)

    async def _score_fresh(
        self, task: str, episodes: Sequence[Episode], usage: CallUsage, failure: Exception | None
    ) -> list[RewardResult]:
        """The other tries, each on a process of its own. A batch that was lost by another episode was none."""
        reward = self._rewards[task]
        tries = 1 + (self._config.retries if reward.retries is None else reward.retries)
        while usage.tries < tries and not (usage.tries and isinstance(failure, CallRaised) and failure.bug):
            if usage.tries:
                await asyncio.sleep(BACKOFF_S * 2 ** (usage.tries - 1))
            try:
                async with self._limits[task], self._pool.claim() as claim:
                    return await self._try_once(claim, task, episodes, usage)
            except _FAILURES as error:
                failure = error
        times = "" if usage.tries == 1 else f" {usage.tries} times; the last time"
        raise RewardFailed(f"the reward {reward.function!r} of task {task!r} failed{times}: {failure}") from failure

    async def _try_once(
        self, claim: ProcessClaim, task: str, episodes: Sequence[Episode], usage: CallUsage
    ) -> list[RewardResult]:
        """A retry gets a fresh process. Raises ProcessLost, CallRaised, ServiceError or InvalidValue."""
        clock = asyncio.get_running_loop().time
        began = taken = clock()
        usage.tries += 1
        try:
            await claim.acquire(fresh=usage.tries > 1)
            usage.cold = usage.cold or not claim.used
            taken = clock()
            results, failure = await self._call(claim, task, episodes)
            if len(results) < len(episodes):
                raise failure or CallRaised("it returned fewer results than it got episodes")
            return results
        finally:
            usage.first_byte_s = clock() - began
            usage.billed_s += clock() - taken

    async def _call(
        self, claim: ProcessClaim, task: str, episodes: Sequence[Episode]
    ) -> tuple[list[RewardResult], CallRaised | None]:
        """The results in order, and what the episode after them raised. Raises ProcessLost, CallRaised or
        InvalidValue."""
        reward = self._rewards[task]
        args = {"reward": reward.function, "episodes": episodes, "args": reward.args, "version": reward.version}
        reply = await claim.call("score", args, reward.deadline or self._config.deadline)
        if not isinstance(reply, dict) or not isinstance(reply.get("results"), list):
            raise InvalidValue("its process returned no list of results")
        if not (error := reply.get("error")):
            return [received(each) for each in reply["results"][: len(episodes)]], None
        claim.kill()  # what raised once may have left its process in a bad state
        return [received(each) for each in reply["results"]], CallRaised(str(error), is_bug(reply.get("classes")))


@dataclass(frozen=True, slots=True)
class _Scored:
    result: RewardResult
    cold: bool
    first_byte_s: float
    billed_s: float


class _Batches:
    """The batches of one task. `seconds` of one episode, as last measured."""

    def __init__(self, pool: RewardPool, task: str) -> None:
        self.seconds = BATCH_S  # one at a time until it is known
        send = partial(pool.score_batch, task)
        self.batcher: Batcher[Episode, _Scored] = Batcher(send, self._size, pool.workers(task))

    def _size(self) -> int:
        return max(1, min(MAX_BATCH, int(BATCH_S / max(self.seconds, 1e-9))))
