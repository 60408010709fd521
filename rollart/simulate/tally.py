"""Totals of the events and samples of a simulation, for the steps after the warmup.

Only sums are kept: memory does not grow with the length of a simulation.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from rollart.core import events as ev

Totals = Counter[str]


class Tally:
    """An event sink. `service_totals` are added whenever a step ends."""

    def __init__(self, clock: Callable[[], float], warmup: int, service_totals: Callable[[], dict[str, float]]) -> None:
        self.totals: Totals = Counter()
        self.step_times: list[float] = []
        self._clock, self._warmup, self._service_totals = clock, warmup, service_totals
        self._started: dict[str, float] = {}
        self._before: Totals = Counter()
        self._after: Totals = Counter()
        self._folds: dict[type, Callable[[Any], None]] = {
            ev.TrajectoryStarted: self._trajectory_started,
            ev.EnvironmentReset: self._reset,
            ev.TurnDone: self._turn,
            ev.Scored: self._scored,
            ev.TrajectoryEnded: self._trajectory_ended,
            ev.BatchTaken: self._batch,
            ev.StepDone: self._step,
            ev.EngineSwapped: self._swapped,
            ev.GroupDropped: self._dropped,
            ev.Warned: self._warned,
        }

    def emit(self, event: ev.AnyEvent) -> None:
        event.t = self._clock()
        self.fold(event)

    def fold(self, event: ev.AnyEvent) -> None:
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event)

    @property
    def measured(self) -> Totals:
        """Totals of the steps after the warmup, or of the whole time if no step ended; `t` is that time."""
        if not self.step_times:
            return self._snapshot()
        return Counter({key: self._after[key] - self._before[key] for key in self._after})

    def _snapshot(self) -> Totals:
        return Counter(self.totals) + Counter(self._service_totals()) + Counter({"t": self._clock()})

    def _trajectory_started(self, event: ev.TrajectoryStarted) -> None:
        self._started[event.trajectory] = event.t

    def _reset(self, event: ev.EnvironmentReset) -> None:
        began = self._started.get(event.trajectory, event.t)
        self.totals["stage claim"] += max(0.0, event.t - event.seconds - began)  # type: ignore[assignment]
        self.totals["stage reset"] += event.seconds  # type: ignore[assignment]
        self.totals["resets"] += 1

    def _turn(self, event: ev.TurnDone) -> None:
        totals: Any = self.totals
        totals["turns"] += 1
        totals["prompt tokens"] += event.prompt
        totals["cached tokens"] += event.cached
        totals["answer tokens"] += event.tokens
        totals["stage queue"] += event.queue_s
        totals["stage generate"] += event.generate_s - event.queue_s
        totals["stage step"] += event.env_s

    def _scored(self, event: ev.Scored) -> None:
        self.totals["stage score"] += event.seconds  # type: ignore[assignment]

    def _trajectory_ended(self, event: ev.TrajectoryEnded) -> None:
        totals: Any = self.totals
        self._started.pop(event.trajectory, None)
        totals["ended"] += 1
        totals["ended tokens"] += event.tokens
        totals["ended seconds"] += event.seconds
        totals[f"outcome {event.outcome.value}"] += 1
        if not event.outcome.trainable:
            totals["wasted tokens"] += event.tokens

    def _batch(self, event: ev.BatchTaken) -> None:
        totals: Any = self.totals
        totals["wait"] += event.waited_s
        totals["trained"] += event.trajectories
        totals["trained tokens"] += event.tokens
        for age, count in event.staleness.items():
            totals[f"age {age}"] += count

    def _step(self, event: ev.StepDone) -> None:
        self.totals["steps"] += 1
        self.totals["train"] += event.seconds  # type: ignore[assignment]
        self.step_times.append(event.t)
        if event.version == self._warmup:
            self._before = self._snapshot()
        self._after = self._snapshot()

    def _swapped(self, event: ev.EngineSwapped) -> None:
        self.totals["swaps"] += 1
        self.totals["exposed"] += event.exposed_s  # type: ignore[assignment]

    def _dropped(self, event: ev.GroupDropped) -> None:
        self.totals[f"dropped {event.reason}"] += 1

    def _warned(self, event: ev.Warned) -> None:
        self.totals["warnings"] += 1
