"""The workload of a run as its event log has it: plain lists of measured numbers, in the order of the log.

Held-out episodes are left out, and responses count only for trajectories that ended. Of cancelled and stale ones it
keeps how far they had come, since slow ones are cut short more often. Times of resets include the retries and hedges of
the run. Nothing before the end of the first training step counts, as processes start and caches fill, unless there was
only one step.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rollart.core import events as ev
from rollart.core import gc_tuning, run_folder
from rollart.core.errors import RollartError
from rollart.core.event_log import read_events
from rollart.core.types import Outcome

_KINDS: tuple[type[ev.Event], ...] = (
    *(ev.TurnDone, ev.TrajectoryStarted, ev.EnvironmentReset, ev.AgentPlayed, ev.Scored, ev.TrajectoryEnded),
    *(ev.BatchTaken, ev.StepDone, ev.Published, ev.EngineSwapped, ev.Placed, ev.HostSample, ev.EngineSample),
)


@dataclass(slots=True)
class TaskMeasurements:
    """Of one task, by key of its `Workload`. A prompt counts once per group; a `delay` is what a generation took
    besides queue, prefill and decode. `starts` are of agents: trajectories under way, and seconds until the first
    request. `cut` has the turn, or the seconds of the reset, of cancelled ones."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    starts: list[tuple[int, float]] = field(default_factory=list)
    cut: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failed: Counter[str] = field(default_factory=Counter)


class MeasuredGeneration(NamedTuple):
    """One request on an engine: admitted at `began`, `new` tokens prefilled until `first`, then decoded until `ended`;
    `context` tokens at its end."""

    engine: str
    began: float
    first: float
    ended: float
    new: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One training step, from taking the batch (`began`) to publishing (`ended`); `seconds` is the training alone."""

    began: float
    ended: float
    seconds: float
    tokens: int


@dataclass(slots=True)
class HostLoad:
    """How busy the machine of the controller was, and how far emulated engines lagged behind their devices."""

    cores: int = 0
    samples: list[float] = field(default_factory=list)
    _engines: dict[str, tuple[ev.EngineSample, ev.EngineSample]] = field(default_factory=dict)

    @property
    def cpu(self) -> float:
        """Share of the CPU seconds that were used, by this run or others."""
        return fmean(self.samples) if self.samples else 0.0

    @property
    def late(self) -> float:
        """Share of the busy time of engines by which they were late."""
        late, busy = (
            sum(getattr(last, key) - getattr(first, key) for first, last in self._engines.values())
            for key in ("late_s", "busy_s")
        )
        return late / busy if busy > 0 else 0.0

    def add(self, event: ev.EngineSample) -> None:
        first, _ = self._engines.get(event.engine, (event, event))
        self._engines[event.engine] = (first, event)


@dataclass(slots=True)
class RunMeasurements:
    """`generations` and `devices` by pool; `swaps` are seconds from the request to load weights to the swap."""

    tasks: dict[str, TaskMeasurements] = field(default_factory=dict)
    generations: dict[str, list[MeasuredGeneration]] = field(default_factory=dict)
    trainings: list[MeasuredStep] = field(default_factory=list)
    swaps: list[float] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)
    host: HostLoad = field(default_factory=HostLoad)


def measure(folder: Path) -> RunMeasurements:
    """From a run folder. Raises RollartError if it holds no run, or one that trained nothing."""
    log = run_folder.events_of(folder)
    done = [event.t for event in islice(read_events(log, ev.Published), 2)]
    reader = _Reader(since=done[0] if len(done) > 1 else 0.0)
    with gc_tuning.disabled():  # what is kept has no reference cycles
        for event in read_events(log, *_KINDS):
            reader.read(event)
    if not reader.measurements.trainings or not any(log.values["turns"] for log in reader.measurements.tasks.values()):
        raise RollartError(f"the run in {folder} has not trained a step; there is nothing to calibrate on")
    return reader.measurements


@dataclass(slots=True)
class _Open:
    """A running trajectory: when it began and as which of its task, when its last reset or turn ended, its context and
    turns so far."""

    began: float
    last: float
    group: str
    number: int
    context: int = 0
    reset: bool = False
    observations: list[int] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)


class _Reader:
    def __init__(self, since: float) -> None:
        self.measurements = RunMeasurements()
        self._since = since
        self._open: dict[str, _Open] = {}
        self._groups: set[str] = set()
        self._running: Counter[str] = Counter()
        self._batch: ev.BatchTaken | None = None
        self._step: ev.StepDone | None = None

    def read(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.TurnDone():
                self._turn(event)
            case ev.TrajectoryStarted() if not event.held_out:
                self._running[event.task] += 1
                self._open[event.trajectory] = _Open(event.t, event.t, event.group, self._running[event.task])
            case ev.EnvironmentReset() if event.trajectory in self._open:
                self._open[event.trajectory].reset, self._open[event.trajectory].last = True, event.t
                if event.t - event.seconds >= self._since:
                    self._log(event.task).values["reset"].append(event.seconds)
            case ev.AgentPlayed() if event.trajectory in self._open and event.t >= self._since:
                self._log(event.task).values["step"].append(event.t - self._open[event.trajectory].last)
            case ev.Scored() if event.trajectory in self._open and event.t >= self._since:
                self._log(event.task).values["reward"].append(event.seconds)
            case ev.TrajectoryEnded():
                self._ended(event)
            case ev.BatchTaken():
                self._batch = event
            case ev.StepDone():
                self._step = event
            case ev.Published():
                self._published(event)
            case ev.EngineSwapped() if event.t > self._since:
                self.measurements.swaps.append(event.seconds)
            case ev.HostSample() if event.t > self._since:
                self.measurements.host.cores = event.cores
                self.measurements.host.samples.append(event.cpu)
            case ev.EngineSample() if event.t > self._since:
                self.measurements.host.add(event)
            case ev.Placed():
                self.measurements.devices[event.pool.partition(": ")[0]] = event.device

    def _log(self, task: str) -> TaskMeasurements:
        tasks = self.measurements.tasks
        return tasks[task] if task in tasks else tasks.setdefault(task, TaskMeasurements())

    def _turn(self, event: ev.TurnDone) -> None:
        trajectory = self._open.get(event.trajectory)
        if trajectory is None:
            return
        values = self._log(event.task).values
        if event.turn == 0:
            if trajectory.group not in self._groups:
                self._groups.add(trajectory.group)
                values["prompt"].append(event.prompt)
        elif event.prompt > trajectory.context:  # else it rewrote its history
            trajectory.observations.append(event.prompt - trajectory.context)
        trajectory.context = event.prompt + event.tokens
        trajectory.responses.append(event.tokens)
        asked, before = event.t - event.env_s - event.generate_s, trajectory.last
        trajectory.last = event.t
        if asked < self._since:
            return
        if trajectory.reset:
            values["step"].append(event.env_s)
        elif event.turn:  # an agent's work between two requests has no event
            values["step"].append(max(0.0, asked - before))
        elif trajectory.began >= self._since:
            self._log(event.task).starts.append((trajectory.number, asked - before))
        values["delay"].append(max(0.0, event.generate_s - (event.queue_s + event.prefill_s + event.decode_s)))
        ended = event.t - event.env_s
        pool = event.pool.partition(": ")[0] or event.engine.rpartition("-")[0]
        self.measurements.generations.setdefault(pool, []).append(
            MeasuredGeneration(
                engine=event.engine,
                began=ended - event.prefill_s - event.decode_s,
                first=ended - event.decode_s,
                ended=ended,
                new=event.prompt - event.cached,
                tokens=event.tokens,
                context=trajectory.context,
            )
        )

    def _ended(self, event: ev.TrajectoryEnded) -> None:
        trajectory = self._open.pop(event.trajectory, None)
        if trajectory is None:
            return
        self._running[event.task] -= 1
        log = self._log(event.task)
        if event.outcome.trainable:
            log.values["turns"].append(event.turns)
            log.values["observation"] += trajectory.observations
            log.values["response"] += trajectory.responses
        elif event.outcome is Outcome.REWARD_FAILED:
            log.failed["reward"] += 1
        elif event.outcome is Outcome.ENV_FAILED:
            log.failed["step" if trajectory.reset else "reset"] += 1
        elif trajectory.reset:
            log.cut["turns"].append(event.turns + 1)
        elif trajectory.began >= self._since:
            log.cut["reset"].append(event.t - trajectory.began)

    def _published(self, event: ev.Published) -> None:
        batch, step = self._batch, self._step
        if batch is not None and step is not None and batch.t >= self._since:
            self.measurements.trainings.append(MeasuredStep(batch.t, event.t, step.seconds, step.tokens))
        self._batch = self._step = None
