"""Learning curves by task: one point for each step, with what a mean alone hides."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from rollart.app.dashboard.log_view import LogView
from rollart.core import events as ev

_Z = 1.96  # 95% of a normal distribution


@dataclass(slots=True)
class Moments:
    """Count, mean and spread of values that are not kept."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)

    @property
    def deviation(self) -> float:
        return math.sqrt(max(0.0, self.squares / max(1, self.count) - self.mean**2))

    @property
    def error(self) -> float:
        """Half the 95% interval of the mean."""
        return _Z * self.deviation / math.sqrt(max(1, self.count))


@dataclass(slots=True)
class _Task:
    """Since the last step. `spreads` are the standard deviations within groups."""

    rewards: Moments = field(default_factory=Moments)
    success: Moments = field(default_factory=Moments)
    spreads: Moments = field(default_factory=Moments)
    flat: int = 0
    points: list[dict[str, Any]] = field(default_factory=list)


class StepCurves(LogView):
    def __init__(self) -> None:
        super().__init__(
            {
                ev.TrajectoryEnded: self._ended,
                ev.GroupReady: self._group_ready,
                ev.GroupDropped: self._group_dropped,
                ev.BatchTaken: self._batch_taken,
                ev.StepDone: self._step,
                ev.WarmupStep: self._supervised,
                ev.RunStarted: lambda event: self._take_back(event.version),
                ev.RolledBack: lambda event: self._take_back(event.version),
            }
        )
        self._tasks: defaultdict[str, _Task] = defaultdict(_Task)
        self.wasted: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])  # trajectories and tokens by cause
        self.trained: list[dict[str, Any]] = []
        self.losses: dict[int, float] = {}  # of supervised steps
        self._tokens: dict[str, int] = {}  # of the trainable trajectories of groups that wait to be trained

    def _supervised(self, event: ev.WarmupStep) -> None:
        self.losses[event.step] = event.loss

    def _group_ready(self, event: ev.GroupReady) -> None:
        if event.spread is not None:
            task = self._tasks[event.task]
            task.spreads.add(event.spread)
            task.flat += event.spread < 1e-6

    def _group_dropped(self, event: ev.GroupDropped) -> None:
        if tokens := self._tokens.pop(event.group, 0):
            self._waste(event.reason, event.trajectories, tokens)

    def _batch_taken(self, event: ev.BatchTaken) -> None:
        for group in event.ids:
            self._tokens.pop(group, None)

    def _ended(self, event: ev.TrajectoryEnded) -> None:
        if event.held_out:
            return
        if not event.outcome.trainable:
            self._waste(event.outcome.value, 1, event.tokens)
            return
        self._tokens[event.group] = self._tokens.get(event.group, 0) + event.tokens
        task = self._tasks[event.task]
        if event.reward is not None:
            task.rewards.add(event.reward)
        if event.success is not None:
            task.success.add(event.success)

    def _waste(self, cause: str, trajectories: int, tokens: int) -> None:
        cause = cause if cause in self.wasted or len(self.wasted) < 32 else "other reasons"
        self.wasted[cause][0] += trajectories
        self.wasted[cause][1] += tokens

    def _step(self, event: ev.StepDone) -> None:
        for task in self._tasks.values():
            if task.rewards.count:
                task.points.append(
                    {
                        "version": event.version,
                        "reward": task.rewards.mean,
                        "error": task.rewards.error,
                        "success": task.success.mean if task.success.count else None,
                        "spread": task.spreads.mean if task.spreads.count else None,
                        "flat": task.flat / task.spreads.count if task.spreads.count else None,
                        "n": task.rewards.count,
                    }
                )
            task.rewards, task.success, task.spreads, task.flat = Moments(), Moments(), Moments(), 0
        self.trained.append({"version": event.version, "tasks": event.tasks})

    def _take_back(self, version: int) -> None:
        """Steps after `version` are made again."""
        for task in self._tasks.values():
            task.points = [point for point in task.points if point["version"] <= version]
        self.trained = [point for point in self.trained if point["version"] <= version]

    def rewards(self) -> dict[str, list[dict[str, Any]]]:
        return {name: thin(task.points) for name, task in self._tasks.items() if task.points}


def thin(points: list[Any], most: int = 600) -> list[Any]:
    """Every k-th point, and the last: a chart has no more pixels than this.

    >>> thin([1, 2, 3, 4, 5], 2)
    [1, 4, 5]
    """
    every = max(1, math.ceil(len(points) / most))
    kept = points[::every]
    return kept if not points or kept[-1] is points[-1] else [*kept, points[-1]]
