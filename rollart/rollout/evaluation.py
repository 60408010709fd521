"""Held-out episodes: the same ones at every version, run like any other trajectory and never trained."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from rollart.core.errors import RollartError
from rollart.core.events import Evaluated, EventSink, Warned, WorkStarted
from rollart.core.types import Outcome, Trajectory
from rollart.rollout.ledger import Ledger
from rollart.rollout.trajectory import Attempt, RolloutTask


def succeeded(trajectory: Trajectory) -> bool:
    """As the reward or the environment says, else: it finished with a positive reward."""
    if trajectory.success is not None:
        return trajectory.success
    return trajectory.outcome is Outcome.FINISHED and (trajectory.reward or 0.0) > 0


def _passed(trajectories: Sequence[Trajectory]) -> float:
    """The share of episodes with an attempt that succeeded."""
    solved = {trajectory.seed for trajectory in trajectories if succeeded(trajectory)}
    return len(solved) / len({trajectory.seed for trajectory in trajectories})


def evaluated(completed: Sequence[Trajectory], *, version: int, failed: int, samples: int, final: bool) -> Evaluated:
    """The result of a task's trajectories, of which there is one at least."""
    return Evaluated(
        version=version,
        task=completed[0].task,
        episodes=len(completed),
        success=sum(map(succeeded, completed)) / len(completed),
        reward=sum(trajectory.reward or 0.0 for trajectory in completed) / len(completed),
        failed=failed,
        final=final,
        samples=samples,
        passed=_passed(completed),
    )


class EpisodeRunner(Protocol):
    async def run(self, attempt: Attempt) -> Trajectory: ...


class Evaluator:
    """`samples`: attempts at each episode. `available`: held-out episodes of the tasks that have only so many: none is
    played twice, or the interval of the result would be too narrow."""

    def __init__(
        self,
        tasks: Sequence[RolloutTask],
        runner: EpisodeRunner,
        ledger: Ledger,
        sink: EventSink,
        *,
        samples: int = 1,
        available: Mapping[str, int] | None = None,
    ) -> None:
        self._tasks, self._runner, self._ledger, self._sink = tasks, runner, ledger, sink
        self._samples, self._available = samples, available or {}

    async def run(self, version: int, episodes: int, *, label: str = "eval", final: bool = False) -> list[Evaluated]:
        """Run `episodes` of every task, or all that it has. Those that a service failed are counted apart, never as
        failures of the policy.

        A task of which no episode completed has no result, and a warning says so; if no task has one, that is an error
        in the evaluations before and after RL (`final`)."""
        self._sink.emit(WorkStarted(work="evaluation", version=version))
        results = await asyncio.gather(*(self._task(task, version, episodes, label, final) for task in self._tasks))
        completed = [result for result in results if isinstance(result, Evaluated)]
        for result in results:
            if isinstance(result, str):
                if final and not completed:
                    raise RollartError(result)
                self._sink.emit(Warned(message=result))
        return completed

    async def _task(self, task: RolloutTask, version: int, episodes: int, label: str, final: bool) -> Evaluated | str:
        """The result, or why there is none."""
        episodes = min(episodes, self._available.get(task.name, episodes))
        attempts = [self._attempt(task, version, member, label) for member in range(episodes * self._samples)]
        trajectories = await asyncio.gather(*(self._runner.run(attempt) for attempt in attempts))
        for trajectory in trajectories:
            self._ledger.add(trajectory, held_out=True)
        completed = [trajectory for trajectory in trajectories if trajectory.outcome.trainable]
        if not completed:
            last = trajectories[-1]
            return f"no held-out episode of task {task.name} completed; the last: {last.outcome}: {last.reason}"
        failed = len(attempts) - len(completed)
        result = evaluated(completed, version=version, failed=failed, samples=self._samples, final=final)
        self._sink.emit(result)
        return result

    def _attempt(self, task: RolloutTask, version: int, member: int, label: str) -> Attempt:
        group = f"{label}-v{version:06d}-{task.name}"
        return Attempt(
            id=f"{group}.{member}",
            task=task,
            group=group,
            member=member,
            seed=task.episode_seed(member // self._samples, "held out"),
            version=version,
            held_out=True,
            peers=self._samples,
        )
