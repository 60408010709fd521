"""Rollouts without training: episodes of every task, several attempts at each, as many at once as `parallel`.

Invariants: the attempts follow from the plan alone, with their ids, episodes and random numbers, so a sampling that was
interrupted and goes on plays what is missing, as it would have been played; an attempt that a service failed is played
again, at most `retries` times; what fails then is recorded as such and never as a reward.
"""

import asyncio
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from rollart.core.types import Outcome
from rollart.rollout.evaluation import EpisodeRunner
from rollart.rollout.ledger import Ledger
from rollart.rollout.trajectory import Attempt, RolloutTask


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """`samples` attempts at each of `episodes` of every task, drawn from `seed`, or the held-out ones."""

    episodes: int
    samples: int
    held_out: bool = False
    seed: int = 0

    def groups(self, task: RolloutTask) -> Iterator[str]:
        """One for each episode."""
        return (f"sample-{task.name}-{number:06d}" for number in range(self.episodes))

    def attempts(self, tasks: Sequence[RolloutTask], version: int = 0) -> Iterator[Attempt]:
        """The tasks in turn, so that none waits for the end of another."""
        for number, groups in enumerate(zip(*map(self.groups, tasks), strict=True)):
            for task, group in zip(tasks, groups, strict=True):
                for member in range(self.samples):
                    yield Attempt(
                        id=f"{group}.{member}",
                        task=task,
                        group=group,
                        member=member,
                        seed=self._seed(task, number),
                        version=version,
                        held_out=self.held_out,
                        peers=self.samples,
                    )

    def _seed(self, task: RolloutTask, number: int) -> int:
        if self.held_out:
            return task.episode_seed(number, "held out")
        return task.episode_seed(number, self.seed, "sample", run_seed=self.seed)


class Sampler:
    def __init__(self, runner: EpisodeRunner, ledger: Ledger, *, parallel: int, retries: int = 0) -> None:
        self._runner, self._ledger, self._parallel, self._retries = runner, ledger, parallel, retries

    async def run(self, plan: SamplePlan, tasks: Sequence[RolloutTask], done: Set[str] = frozenset()) -> None:
        """Play all attempts of the plan but those whose ids are in `done`."""
        left = (attempt for attempt in plan.attempts(tasks) if attempt.id not in done)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._parallel):
                group.create_task(self._play(left))

    async def _play(self, left: Iterator[Attempt]) -> None:
        for attempt in left:
            for retry in range(self._retries + 1):
                if retry:
                    attempt = replace(attempt, turns=[], info={}, episode_over=False, reason="")
                trajectory = await self._runner.run(attempt)
                if trajectory.outcome is Outcome.CANCELLED:
                    return  # the sampling was: a runner returns even then
                if trajectory.outcome.trainable:
                    break
            self._ledger.add(trajectory, held_out=True)  # in the ledger: never trained
