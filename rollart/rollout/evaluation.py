"""Held-out episodes: the same ones at every version, played like any other trajectory and never trained."""

import asyncio
from collections.abc import Sequence

from rollart.core.errors import RollartError
from rollart.core.events import Evaluated, EventSink, Warned
from rollart.core.seeds import seed_of
from rollart.core.types import Outcome, Trajectory
from rollart.rollout.ledger import Ledger
from rollart.rollout.trajectory import Attempt, RolloutTask, TrajectoryRunner


def succeeded(trajectory: Trajectory) -> bool:
    """What the reward or the environment called a success, else a positive reward at an end that was not a limit."""
    if trajectory.success is not None:
        return trajectory.success
    return trajectory.outcome is Outcome.FINISHED and (trajectory.reward or 0.0) > 0


class Evaluator:
    def __init__(self, tasks: Sequence[RolloutTask], player: TrajectoryRunner, ledger: Ledger, sink: EventSink) -> None:
        self._tasks, self._player, self._ledger, self._sink = tasks, player, ledger, sink

    async def run(self, version: int, episodes: int, *, label: str = "eval", final: bool = False) -> list[Evaluated]:
        """Play `episodes` of every task. What the machinery failed to play is counted apart, never as a failure.

        A task of which nothing could be played has no result, and a warning says so; if that is so of every task, it is
        an error before and after RL."""
        results = await asyncio.gather(*(self._task(task, version, episodes, label, final) for task in self._tasks))
        played = [result for result in results if isinstance(result, Evaluated)]
        for result in results:
            if isinstance(result, str):
                if final and not played:
                    raise RollartError(result)
                self._sink.emit(Warned(message=result))
        return played

    async def _task(self, task: RolloutTask, version: int, episodes: int, label: str, final: bool) -> Evaluated | str:
        """The result, or why there is none."""
        attempts = [self._attempt(task, version, number, label) for number in range(episodes)]
        trajectories = await asyncio.gather(*(self._player.run(attempt) for attempt in attempts))
        for trajectory in trajectories:
            self._ledger.add(trajectory, held_out=True)
        played = [trajectory for trajectory in trajectories if trajectory.outcome.trainable]
        if not played:
            how = f"the last ended as {trajectories[-1].outcome}: {trajectories[-1].reason}"
            return f"no held-out episode of task {task.name} could be played; {how}"
        result = Evaluated(
            version=version,
            task=task.name,
            episodes=len(played),
            success=sum(map(succeeded, played)) / len(played),
            reward=sum(trajectory.reward or 0.0 for trajectory in played) / len(played),
            failed=episodes - len(played),
            final=final,
        )
        self._sink.emit(result)
        return result

    def _attempt(self, task: RolloutTask, version: int, number: int, label: str) -> Attempt:
        group = f"{label}-v{version:06d}-{task.name}"
        seed = seed_of("held out", task.name, number)
        return Attempt(f"{group}.{number}", task, group, number, seed, version, held_out=True)
