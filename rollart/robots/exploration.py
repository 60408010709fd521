"""Episodes with exploration, as attempts of the scheduler that every run has.

To the control plane a chunk is one token: which candidate was chosen, its log-probability, and the version that chose
it. So groups, admission, the staleness bound, quarantine, ledger and resume are those for language. The candidates
travel in the trajectory's `info`, for the learner.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import load, save
from torch import Tensor

from rollart.config import TaskConfig
from rollart.core.errors import EngineFailed
from rollart.core.seeds import seed_of
from rollart.core.types import Batch, Outcome, Publication, Trajectory, Turn
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import Demonstration
from rollart.robots.episodes import BatchedPolicy, play
from rollart.robots.learner import Proposal, TrainedPolicy
from rollart.robots.tuning_learner import ChunkBatch
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.trajectory import Attempt, AttemptRunner
from rollart.training.advantages import ADVANTAGES

_CHUNKS, _RATE = "chunks", "reward_per_step"  # in the info of a trajectory
POLICY_DEADLINE_S = 240.0  # less than that of an episode, so that the environment is not blamed


class ActingPolicy(BatchedPolicy):
    """The policy in `folder`, which the control plane sees as it sees engines. Its version is the number of updates,
    each of `optimizer_steps`."""

    def __init__(self, folder: Path, optimizer_steps: int, deadline: float = POLICY_DEADLINE_S) -> None:
        super().__init__(TrainedPolicy(folder))
        self._folder, self._optimizer_steps, self._floor = folder, optimizer_steps, 0
        self._deadline = deadline
        self._subscribers: list[Callable[[], None]] = []
        self._loaded = asyncio.Event()

    @property
    def serving(self) -> int:
        return self.version_at(self.policy.step)

    @property
    def target(self) -> int:
        return self.serving

    def version_at(self, step: int) -> int:
        return step // self._optimizer_steps

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        self._subscribers.append(on_change)
        return lambda: self._subscribers.remove(on_change)

    def require(self, version: int) -> None:
        self._floor = version

    def announce(self, publication: Publication) -> None:
        """It acts from the next chunk on."""
        if publication.version > self.serving:
            self.policy = TrainedPolicy(self._folder)
            self._loaded.set()
            for on_change in self._subscribers:
                on_change()

    async def load(self, publication: Publication) -> None:
        self.announce(publication)

    async def propose(self, history: Tensor, noise: Tensor) -> tuple[Proposal, int]:
        """Waits for a version that may act. Raises EngineFailed if there is none within `deadline` seconds."""
        try:
            async with asyncio.timeout(self._deadline):
                while self.serving < self._floor:
                    self._loaded.clear()
                    await self._loaded.wait()
        except TimeoutError:
            raise EngineFailed(
                f"version {self._floor} of the policy was not there after {self._deadline:g} s; "
                "lower tuning.optimizer_steps if an update takes longer"
            ) from None
        return await super().propose(history, noise)


@dataclass
class Trace:
    """What an episode leaves to learn from: a turn of the attempt and an entry of `conditions` and `candidates` for
    each chunk, and of what was observed and executed one for each step. `conditions` are what the policy was shown,
    which is off by `shift`."""

    attempt: Attempt
    acting: ActingPolicy
    generator: torch.Generator
    shift: Tensor
    conditions: list[Tensor] = field(default_factory=list)
    candidates: list[Tensor] = field(default_factory=list)
    observations: list[Tensor] = field(default_factory=list)
    commands: list[Tensor] = field(default_factory=list)

    def disturbed(self, history: Tensor) -> Tensor:
        """It acts as if things were elsewhere, as far all through the episode."""
        return history + self.shift

    def choose(self, seen: Tensor, proposal: Proposal, step: int) -> int:
        """By the policy's probabilities."""
        version, logprobs = self.acting.version_at(step), proposal.scores.log_softmax(-1)
        index = int(torch.multinomial(logprobs.exp(), 1, generator=self.generator))
        self.attempt.turns.append(
            Turn(
                messages=(),
                prompt=(),
                action=f"candidate {index} of {len(logprobs)}",
                tokens=(index,),
                logprobs=(logprobs[index].item(),),
                versions=(version,),
                finish="stop",
            )
        )
        self.conditions.append(proposal.condition)
        self.candidates.append(proposal.candidates)
        self.observations.append(seen[None])
        self.attempt.on_version(version)
        return index

    def observe(self, commands: Tensor, seen: Tensor) -> None:
        self.commands.append(commands)
        self.observations[-1] = torch.cat([self.observations[-1], seen[:-1]])

    def encode(self) -> bytes:
        data: bytes = save(
            {
                "conditions": torch.stack(self.conditions),
                "candidates": torch.stack(self.candidates),
                "observations": torch.cat(self.observations),
                "commands": torch.cat(self.commands),
            }
        )
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotRunner(AttemptRunner):
    """Episodes of a robot policy; success is the reward. The first of a group explores by its choices alone, the others
    also by a disturbance of what the policy observes, of the size `explore`."""

    acting: ActingPolicy
    task: TaskConfig
    explore: float

    async def _play(self, attempt: Attempt) -> Outcome:
        attempt.phase = "waiting for an environment"
        seed = seed_of(attempt.seed, "member", attempt.member)
        generator = torch.Generator().manual_seed(seed_of(seed, "exploration"))
        size = self.explore if attempt.member else 0.0
        shift = (
            size * self.acting.policy.scaling.spans * torch.randn(self.acting.policy.observations, generator=generator)
        )
        trace = Trace(attempt, self.acting, generator, shift)
        latent = seed_of(seed, "latent")
        async with self.environments.claim(attempt.task.name, attempt.held_out) as env, attempt.clock.limit():
            self.phases.enter(attempt, "stepping", "acting")
            episode = await play(self.acting, env, self.task, attempt.seed, noise_seed=latent, explorer=trace)
        rate = episode.reward / max(1, episode.steps)
        attempt.info.update(success=episode.success, **{_RATE: rate, _CHUNKS: trace.encode()})
        return Outcome.FINISHED

    async def _score(self, attempt: Attempt, trajectory: Trajectory) -> Trajectory:
        success = bool(attempt.info["success"])
        return replace(trajectory, reward=float(success), success=success)


def chunk_batch(batch: Batch, ledger: SqliteLedger, advantage: str, policy: TrainedPolicy) -> ChunkBatch:
    """What the learner needs of its trajectories, which the ledger has. To imitate there is the best success of each
    group: the one with the most reward of the environment for each step. Others succeed by luck, and what is imitated
    of them is as inexact as they are."""
    estimate = ADVANTAGES.find(advantage)
    values = [value for group in estimate([list(group.rewards.values()) for group in batch.groups]) for value in group]
    groups = [[ledger.trajectory(id) for id in group.rewards] for group in batch.groups]
    played = [trajectory for group in groups for trajectory in group]
    traces = [load(trajectory.info[_CHUNKS]) for trajectory in played]
    wins = [[trajectory for trajectory in group if trajectory.success] for group in groups]
    best = {max(group, key=lambda one: float(one.info[_RATE])).id for group in wins if group}
    won = [
        Demonstration(trace["observations"].numpy(), trace["commands"].numpy())
        for trace, trajectory in zip(traces, played, strict=True)
        if trajectory.id in best
    ]
    control = policy.config.control
    if won:
        shown = ImitationData.of(won, control, policy.scaling)
        imitated, imitated_chunks = shown.conditions, shown.chunks
    else:
        sizes = control.history * policy.observations, control.chunk * policy.actions
        imitated, imitated_chunks = (torch.zeros(0, size) for size in sizes)
    turns = [(number, turn) for number, trajectory in enumerate(played) for turn in trajectory.turns]
    return ChunkBatch(
        conditions=torch.cat([trace["conditions"] for trace in traces]),
        candidates=torch.cat([trace["candidates"] for trace in traces]),
        chosen=torch.tensor([turn.tokens[0] for _, turn in turns]),
        logprobs=torch.tensor([turn.logprobs[0] for _, turn in turns]),
        advantages=torch.tensor([values[number] for number, _ in turns]),
        sequences=torch.tensor([number for number, _ in turns]),
        imitated=imitated,
        imitated_chunks=imitated_chunks,
    )
