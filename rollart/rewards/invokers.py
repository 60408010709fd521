"""The rewards of a run, each called through the invoker that its task names.

The invariants: tasks with the same reward section share its concurrency limit and its measured latency. Every score,
failed or not, is one event. Nothing that was started outlives `close`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from rollart.config import INVOKERS, RewardConfig, RewardsConfig, TaskConfig
from rollart.core.errors import ConfigError, RewardFailed, ServiceError
from rollart.core.events import EventSink, RewardCalled
from rollart.core.types import Episode, RewardResult
from rollart.rewards.caller import CallUsage
from rollart.rewards.group_scores import GroupScores
from rollart.rewards.pool import IDLE_S, RewardPool
from rollart.rewards.remote import RemoteReward
from rollart.rewards.transports.base import BuildTransport, CallFailed, RewardTransport


@dataclass(slots=True)
class InvokerTotals:
    """What the calls of one invoker have cost so far, failed and cancelled ones included."""

    scores: int = 0
    failures: int = 0
    tries: int = 0
    hedges: int = 0
    cold_starts: int = 0
    seconds: float = 0.0
    billed_s: float = 0.0

    def add(self, usage: CallUsage, seconds: float) -> None:
        self.tries += usage.tries
        self.hedges += usage.hedges
        self.cold_starts += usage.cold
        self.seconds += seconds
        self.billed_s += usage.billed_s


class Rewards:
    """Implements `core.protocols.RewardInvoker` and `GroupRewardInvoker`. What local rewards print goes to `log`;
    `cluster` is the address of the Ray cluster for those that run there."""

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        config: RewardsConfig,
        log: Path | None = None,
        *,
        sink: EventSink | None = None,
        cluster: str | None = None,
        idle_s: float = IDLE_S,
    ) -> None:
        if waiting := [task.name for task in tasks if task.reward.pool is not None and "url" not in task.reward.args]:
            raise ConfigError(
                f"the reward of task {waiting[0]} is judged by a pool, which a run starts; here, give its reward the "
                "`url` and the `model` of a judge in `args`"
            )
        self._sink = sink
        self._rewards = {task.name: task.reward for task in tasks}
        local = [task for task in tasks if not INVOKERS[task.reward.invoker].transport]
        self._pool = RewardPool(local, config, log, idle_s) if local else None
        self._remote: dict[str, RemoteReward] = {}
        shared: dict[str, RemoteReward] = {}
        for task in tasks:
            if INVOKERS[task.reward.invoker].transport:
                same = task.reward.model_dump_json()
                if same not in shared:
                    transport = build_transport(task.reward, config, cluster)
                    shared[same] = RemoteReward(
                        task.reward, transport, deadline=config.deadline, retries=config.retries
                    )
                self._remote[task.name] = shared[same]
        self._groups = GroupScores(self._score_group, config.group_deadline)
        self.totals: defaultdict[str, InvokerTotals] = defaultdict(InvokerTotals)

    @property
    def processes(self) -> int:
        """Local ones: 0 when nothing has been scored for a while."""
        return self._pool.processes if self._pool is not None else 0

    async def start(self) -> None:
        """Raises ServiceError for what is known to be wrong before the first call."""
        results = await asyncio.gather(*(part.start() for part in self._parts()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def close(self) -> None:
        await self._groups.close()
        await asyncio.gather(*(part.close() for part in self._parts()))

    def _parts(self) -> list[RewardPool | RemoteReward]:
        return [*([self._pool] if self._pool is not None else []), *dict.fromkeys(self._remote.values())]

    async def score(self, task: str, episode: Episode) -> RewardResult:
        """Raises RewardFailed after the last retry, never returns 0 for a failure."""
        return await self._counted(task, episode, lambda usage: self._score(task, episode, usage))

    async def score_member(self, task: str, episode: Episode, peers: int) -> RewardResult:
        """With the other attempts at its episode, as soon as `peers` are there. Raises RewardFailed, as they all do."""
        return await self._counted(task, episode, lambda usage: self._groups.score(task, episode, peers, usage))

    async def _score_group(self, task: str, episodes: Sequence[Episode], usage: CallUsage) -> list[RewardResult]:
        assert self._pool is not None
        return await self._pool.score_group(task, episodes, usage)

    async def _counted(
        self, task: str, episode: Episode, work: Callable[[CallUsage], Awaitable[RewardResult]]
    ) -> RewardResult:
        """One event and one count, however it ends."""
        clock = asyncio.get_running_loop().time
        began, usage, reason = clock(), CallUsage(), ""
        total = self.totals[self._rewards[task].invoker]
        try:
            result = await work(usage)
            total.scores += 1
            return result
        except RewardFailed as error:
            total.failures += 1
            reason = str(error)
            raise
        except asyncio.CancelledError:
            reason = RewardCalled.CANCELLED
            raise
        finally:
            total.add(usage, clock() - began)
            if self._sink is not None:
                reward = self._rewards[task]
                self._sink.emit(
                    RewardCalled(
                        trajectory=episode.id,
                        task=task,
                        function=reward.function,
                        invoker=reward.invoker,
                        seconds=clock() - began,
                        reason=reason,
                        **asdict(usage),
                    )
                )

    async def _score(self, task: str, episode: Episode, usage: CallUsage) -> RewardResult:
        if task not in self._remote:
            assert self._pool is not None
            return await self._pool.score(task, episode, usage)
        try:
            return await self._remote[task].score(episode, usage)
        except CallFailed as error:
            function = self._rewards[task].function
            times = "once" if usage.tries == 1 else f"{usage.tries} times"
            raise RewardFailed(
                f"the reward {function!r} of task {task!r} was called {times}; the last time: {error}"
            ) from error


def build_transport(reward: RewardConfig, config: RewardsConfig, cluster: str | None = None) -> RewardTransport:
    """The transport of an invoker; its package is imported only now. Raises ServiceError if it is not installed."""
    invoker = INVOKERS[reward.invoker]
    try:
        build: BuildTransport = import_module(f"rollart.rewards.transports.{invoker.transport}").build
    except ImportError as error:
        extra = f"[{invoker.extra}]" if invoker.extra else ""
        raise ServiceError(
            f"the invoker {reward.invoker} needs the package {error.name!r}; run: pip install 'rollart{extra}'"
        ) from error
    return build(reward, reward.deadline or config.deadline, cluster)
