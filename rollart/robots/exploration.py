"""Groups of episodes with exploration, for the policy's updates.

Every episode runs on its own clock. An update takes groups that are complete; the others go on, with the new policy
from their next chunk.

Invariants
- Groups that run, are ready or are being trained fill at most alpha + 1 updates, so nothing is started in vain.
- A group whose oldest chunk is more than `alpha` versions old is dropped at once, and counted; it is never trained.
- An episode that the environment could not play counts for nothing: its group does without it, or is dropped.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import torch
from torch import Tensor

from rollart.config import TaskConfig
from rollart.config.robots import TuningConfig
from rollart.core.errors import EnvironmentFailed, RollartError
from rollart.core.events import (
    BatchTaken,
    EventSink,
    GroupDropped,
    GroupReady,
    GroupStarted,
    TrajectoryEnded,
    TrajectoryStarted,
)
from rollart.core.protocols import EnvironmentPool
from rollart.core.seeds import seed_of
from rollart.core.types import Outcome
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import Demonstration
from rollart.robots.episodes import BatchedPolicy, RobotEpisode, play
from rollart.robots.learner import Proposal, TrainedPolicy
from rollart.robots.tuning_learner import ChunkBatch
from rollart.training.advantages import ADVANTAGES

_LEAST_MEMBERS = 2  # with fewer, there is nothing to compare
_MAX_LOST_GROUPS = 4  # in a row, before the run gives up


@dataclass
class Trace:
    """What an episode leaves to learn from: an entry for each chunk, and of what was executed one for each step."""

    group: "EpisodeGroup"
    generator: torch.Generator
    proposals: list[Proposal] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    observations: list[Tensor] = field(default_factory=list)
    commands: list[Tensor] = field(default_factory=list)

    def choose(self, seen: Tensor, proposal: Proposal, step: int) -> int:
        """By the policy's probabilities."""
        self.group.add_step(step)
        logprobs = proposal.scores.log_softmax(-1)
        index = int(torch.multinomial(logprobs.exp(), 1, generator=self.generator))
        self.proposals.append(proposal)
        self.chosen.append(index)
        self.logprobs.append(logprobs[index].item())
        self.observations.append(seen[None])
        return index

    def observe(self, commands: Tensor, seen: Tensor) -> None:
        self.commands.append(commands)
        self.observations[-1] = torch.cat([self.observations[-1], seen[:-1]])

    def demonstration(self) -> Demonstration:
        return Demonstration(torch.cat(self.observations).numpy(), torch.cat(self.commands).numpy())


@dataclass(eq=False)
class EpisodeGroup:
    """Episodes that start alike. `oldest`: the training step of the oldest policy that acted in it."""

    number: int
    seed: int
    oldest: int | None = None
    played: list[tuple[RobotEpisode, Trace]] = field(default_factory=list)
    failure: str = ""

    @property
    def id(self) -> str:
        return f"g{self.number}"

    @property
    def rewards(self) -> list[float]:
        return [float(episode.success) for episode, _ in self.played]

    @property
    def chunks(self) -> int:
        return sum(len(trace.chosen) for _, trace in self.played)

    def add_step(self, step: int) -> None:
        self.oldest = step if self.oldest is None else min(self.oldest, step)


class GroupPlayer:
    """`version`: of the policy that acts now. `number`: of the first group; its seed follows from it."""

    def __init__(
        self,
        policy: TrainedPolicy,
        pool: EnvironmentPool,
        task: TaskConfig,
        tuning: TuningConfig,
        *,
        seed: int,
        parallel: int,
        version: int,
        number: int,
        sink: EventSink,
    ) -> None:
        self.number, self.version = number, version
        self._acting, self._pool, self._task = BatchedPolicy(policy), pool, task
        self._tuning, self._seed, self._sink = tuning, seed, sink
        self._room = asyncio.Semaphore(parallel)
        self._batches, self._training, self._lost = version, 0, 0
        self._running: dict[EpisodeGroup, asyncio.Task[None]] = {}
        self._ready: list[EpisodeGroup] = []
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def policy(self) -> TrainedPolicy:
        return self._acting.policy

    async def take(self) -> list[EpisodeGroup]:
        """The groups of the next update, oldest first. Every call of an environment has a deadline, so this ends.
        Raises RollartError."""
        began = self._now()
        self._admit()
        while self._error is None and len(self._ready) < self._tuning.groups:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        self._ready.sort(key=lambda group: group.number)
        taken, self._ready = self._ready[: self._tuning.groups], self._ready[self._tuning.groups :]
        self._training, self._batches = len(taken), self._batches + 1
        ages = Counter(self.version - self._version_of(group) for group in taken for _ in group.played)
        self._sink.emit(
            BatchTaken(
                step=self.version,
                ids=[group.id for group in taken],
                groups={self._task.name: len(taken)},
                trajectories=sum(len(group.played) for group in taken),
                tokens=sum(group.chunks for group in taken),
                waited_s=self._now() - began,
                staleness=dict(ages),
            )
        )
        self._admit()
        return taken

    def advance(self, policy: TrainedPolicy) -> None:
        """The update is done: act with its policy, and drop what has become too old."""
        self._acting.policy, self.version, self._training = policy, self.version + 1, 0
        for group in [*self._running, *self._ready]:
            if self.version - self._version_of(group) > self._tuning.alpha:
                self._drop(group, Outcome.STALE)
        self._admit()

    async def close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _version_of(self, group: EpisodeGroup) -> int:
        return self.version if group.oldest is None else group.oldest // self._tuning.optimizer_steps

    def _admit(self) -> None:
        tuning = self._tuning
        left = (tuning.steps - self._batches) * tuning.groups
        room = min((tuning.alpha + 1) * tuning.groups - self._training, left)
        while len(self._running) + len(self._ready) < room:
            group = EpisodeGroup(self.number, seed_of(self._seed, self._task.name, "tuning", self.number))
            self.number += 1
            self._sink.emit(
                GroupStarted(
                    group=group.id,
                    task=self._task.name,
                    seed=group.seed,
                    members=tuning.group_size,
                    version=self.version,
                )
            )
            task = asyncio.create_task(self._play_group(group))
            self._running[group] = task
            task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        self._changed.set()

    async def _play_group(self, group: EpisodeGroup) -> None:
        began = self._now()
        try:
            async with asyncio.TaskGroup() as members:
                for member in range(self._tuning.group_size):
                    members.create_task(self._play_member(group, member))
        finally:
            self._running.pop(group, None)
        if len(group.played) < _LEAST_MEMBERS:
            self._lost += 1
            self._drop(group, Outcome.ENV_FAILED)
            if self._lost >= _MAX_LOST_GROUPS:
                raise RollartError(f"{self._lost} groups of {self._task.name} could not be played; {group.failure}")
            self._admit()
            return
        self._lost = 0
        self._ready.append(group)
        rewards = group.rewards
        self._sink.emit(
            GroupReady(
                group=group.id,
                task=self._task.name,
                seconds=self._now() - began,
                reward=fmean(rewards),
                spread=pstdev(rewards),
            )
        )

    async def _play_member(self, group: EpisodeGroup, member: int) -> None:
        name, seed = f"{group.id}.{member}", seed_of(group.seed, "member", member)
        generator = torch.Generator().manual_seed(seed_of(seed, "exploration"))
        trace = Trace(group, generator)
        async with self._room:
            began, episode, outcome = self._now(), None, Outcome.CANCELLED
            self._sink.emit(
                TrajectoryStarted(trajectory=name, task=self._task.name, group=group.id, version=self.version)
            )
            try:
                async with self._pool.claim(self._task.name, held_out=False) as env:
                    noise_seed = seed_of(seed, "latent")
                    episode = await play(
                        self._acting, env, self._task, group.seed, noise_seed=noise_seed, explorer=trace
                    )
                outcome = Outcome.FINISHED
                group.played.append((episode, trace))
            except EnvironmentFailed as error:
                outcome, group.failure = Outcome.ENV_FAILED, str(error)
            finally:
                self._sink.emit(self._trajectory_ended(name, trace, episode, outcome, self._now() - began))

    def _trajectory_ended(
        self, name: str, trace: Trace, episode: RobotEpisode | None, outcome: Outcome, seconds: float
    ) -> TrajectoryEnded:
        steps = sum(map(len, trace.commands))
        return TrajectoryEnded(
            trajectory=name,
            task=self._task.name,
            group=trace.group.id,
            outcome=outcome,
            turns=len(trace.chosen),
            tokens=steps,
            action_tokens=steps,
            seconds=seconds,
            reward=float(episode.success) if episode else None,
            success=episode.success if episode else None,
            reason=trace.group.failure if outcome is Outcome.ENV_FAILED else "",
        )

    def _drop(self, group: EpisodeGroup, reason: Outcome) -> None:
        if (task := self._running.pop(group, None)) is not None:
            task.cancel()
        if group in self._ready:
            self._ready.remove(group)
        self._sink.emit(
            GroupDropped(group=group.id, task=self._task.name, reason=reason, trajectories=len(group.played))
        )


def chunk_batch(groups: Sequence[EpisodeGroup], advantage: str, policy: TrainedPolicy) -> ChunkBatch:
    """What the learner needs of them."""
    estimate = ADVANTAGES.find(advantage)
    advantages = estimate([group.rewards for group in groups])
    traces = [
        (trace, value)
        for group, values in zip(groups, advantages, strict=True)
        for (_, trace), value in zip(group.played, values, strict=True)
    ]
    won = [trace.demonstration() for group in groups for episode, trace in group.played if episode.success]
    control = policy.config.control
    if won:
        shown = ImitationData.of(won, control, policy.scaling)
        imitated, imitated_chunks = shown.conditions, shown.chunks
    else:
        sizes = control.history * policy.observations, control.chunk * policy.actions
        imitated, imitated_chunks = (torch.zeros(0, size) for size in sizes)
    proposals = [proposal for trace, _ in traces for proposal in trace.proposals]
    return ChunkBatch(
        conditions=torch.stack([proposal.condition for proposal in proposals]),
        candidates=torch.stack([proposal.candidates for proposal in proposals]),
        chosen=torch.tensor([index for trace, _ in traces for index in trace.chosen]),
        logprobs=torch.tensor([value for trace, _ in traces for value in trace.logprobs]),
        advantages=torch.tensor([value for trace, value in traces for _ in trace.chosen]),
        sequences=torch.tensor([number for number, (trace, _) in enumerate(traces) for _ in trace.chosen]),
        imitated=imitated,
        imitated_chunks=imitated_chunks,
    )
