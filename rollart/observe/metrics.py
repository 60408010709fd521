"""The event log folded into numbers. Every view reads these, so the live screen and the summary cannot disagree.

One event costs constant time. Memory grows only with the trajectories in flight, the optimizer steps and the
evaluations. A resume takes back the steps after the version it starts from: they will be made again.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from rollart.core import events as ev
from rollart.observe.aggregates import Rate, mean
from rollart.observe.metric_table import MetricValues
from rollart.observe.service_metrics import EnvironmentMetrics, RewardMetrics, RouteMetrics, SwapMetrics
from rollart.observe.snapshot import (
    STAGES,
    EndedTrajectory,
    HeldOutPoint,
    PipelineCounts,
    Snapshot,
    StepPoint,
    Utilisation,
    WorkerPlacement,
)
from rollart.observe.task_metrics import TaskMetrics

_SLOWEST = 10
_REASONS = 64


class _Open(NamedTuple):
    """A trajectory in flight."""

    started: float
    stages: dict[str, float]


class Metrics:
    """Call `fold` with each event; `snapshot` returns the current values."""

    def __init__(self) -> None:
        self.t = 0.0
        self.run: ev.RunStarted | None = None
        self.phase = "starting"
        self.ended = False
        self.resumes = 0
        self.version = 0
        self.played = 0
        self.tasks: dict[str, TaskMetrics] = {}
        self.history: list[StepPoint] = []
        self.staleness: Counter[int] = Counter()
        self.drops: Counter[str] = Counter()
        self.warnings: deque[str] = deque(maxlen=5)
        self.warmup: tuple[int, int, float] | None = None
        self.pipeline = PipelineCounts()
        self.waited_s = 0.0
        self._values = MetricValues()
        self._engine, self._trainer, self._environments = Rate(), Rate(), Rate()
        self._engines: dict[str, ev.EngineSample] = {}
        self._sampled: ev.PipelineSample | None = None
        self._sampled_s = 0.0
        self._batches: dict[int, ev.BatchTaken] = {}
        self._open: dict[str, _Open] = {}
        self._rl_before: Mapping[str, float] = {}
        self._rl_start: Mapping[str, float] | None = None
        self._rl_end: Mapping[str, float] | None = None
        self._step_times: deque[float] = deque(maxlen=20)
        self._slowest: list[tuple[float, int, EndedTrajectory]] = []
        self._count = 0
        self._routes = RouteMetrics()
        self._environment_use, self._reward_use = EnvironmentMetrics(), RewardMetrics()
        self._places: dict[str, WorkerPlacement] = {}
        self._swaps = SwapMetrics()
        self._handlers = self._table()

    def _table(self) -> dict[type, Callable[[Any], None]]:
        return {
            ev.RunStarted: self._run_started,
            ev.RunEnded: self._run_ended,
            ev.RolledBack: self._rolled_back,
            ev.Placed: self._placed,
            ev.ServiceStarted: self._service_started,
            ev.WarmupStep: self._warmup_step,
            ev.GroupStarted: self._group_started,
            ev.GroupDropped: self._group_dropped,
            ev.TrajectoryStarted: self._trajectory_started,
            ev.EnvironmentReset: self._env_reset,
            ev.ResetHedged: self._environment_use.hedged,
            ev.EnvironmentLost: self._environment_use.lost,
            ev.RewardCalled: self._reward_use.called,
            ev.TurnDone: self._turn_done,
            ev.Scored: self._scored,
            ev.AgentPlayed: self._agent_played,
            ev.TrajectoryEnded: self._trajectory_ended,
            ev.BatchTaken: self._batch_taken,
            ev.StepDone: self._step_done,
            ev.EngineSample: self._engine_sample,
            ev.EngineSwapped: self._swaps.add,
            ev.PipelineSample: self._pipeline_sample,
            ev.Evaluated: self._evaluated,
            ev.Quarantined: self._quarantined,
            ev.Released: self._released,
            ev.Warned: self._warned,
        }

    def fold(self, event: ev.AnyEvent) -> None:
        self.t = event.t
        self._values.fold(event)
        handler = self._handlers.get(type(event))
        if handler:
            handler(event)

    def _totals(self) -> dict[str, float]:
        """Totals at this moment. RL is what lies between two of them: from the first rollout to the last step."""
        busy = {"engine": self._engine, "trainer": self._trainer, "environments": self._environments}
        totals = {f"{name}_busy_s": rate.total for name, rate in busy.items()}
        return self._values.totals() | totals | {"seconds": self.t, "sampled_s": self._sampled_s}

    def _rl(self) -> Counter[str]:
        """What RL took so far, without the starts and evaluations around it."""
        rl = Counter(self._rl_before)
        if self._rl_start is not None and self._rl_end is not None:
            rl.update(self._rl_end)
            rl.subtract(self._rl_start)
        return rl

    def _task(self, name: str) -> TaskMetrics:
        if name not in self.tasks:
            self.tasks[name] = TaskMetrics(name)
        return self.tasks[name]

    def _run_started(self, event: ev.RunStarted) -> None:
        self.run, self.phase, self.version, self.played = event, "starting", event.version, 0
        self.ended = False
        self.resumes += event.resumed
        for name in event.tasks:
            self._task(name)
        self._forget_after(event.version)
        self._rl_before, self._rl_start, self._rl_end = self._rl(), None, None
        self.pipeline, self._sampled = PipelineCounts(), None
        for gone in (self._engines, self._batches, self._open, self._step_times):
            gone.clear()

    def _forget_after(self, version: int) -> None:
        """Drop the steps and evaluations after `version`: they will be made again."""
        self.version = version
        for task in self.tasks.values():
            task.held_out = [point for point in task.held_out if point.version <= version]
        while self.history and self.history[-1].version > version:
            self.staleness.subtract(self.history.pop().staleness)
        self._batches.clear()
        self._step_times.clear()

    def _placed(self, event: ev.Placed) -> None:
        self._places[event.name] = WorkerPlacement(
            role=event.role,
            pool=event.pool,
            name=event.name,
            wanted=event.wanted,
            device=event.device,
            node=event.node,
            why=event.why,
        )

    def _rolled_back(self, event: ev.RolledBack) -> None:
        self._forget_after(event.version)
        self.warnings.append(f"the trainer was lost and restarted from version {event.version}: {event.reason}")

    def _run_ended(self, event: ev.RunEnded) -> None:
        self.phase, self.ended = event.reason, True
        if event.reason not in ("finished", "interrupted"):
            self.phase = "failed"
            self.warnings.append(event.reason)
        self.pipeline = PipelineCounts()

    def _service_started(self, event: ev.ServiceStarted) -> None:
        if self.phase == "warming up":
            self.phase = "starting"

    def _warmup_step(self, event: ev.WarmupStep) -> None:
        self.phase, self.warmup = "warming up", (event.step, event.steps, event.loss)
        if self.run is not None and self.run.work in ("sft", "imitation"):  # all of its training is supervised
            self.phase, self.version = "training", event.step

    def _group_started(self, event: ev.GroupStarted) -> None:
        self.phase = "training"
        if self._rl_start is None:
            self._rl_start = self._rl_end = self._totals()
            self._values.since_step(event.t)

    def _drop(self, reason: str, count: int) -> None:
        known = reason in self.drops or len(self.drops) < _REASONS
        self.drops[reason if known else "other reasons"] += count

    def _group_dropped(self, event: ev.GroupDropped) -> None:
        if event.trajectories:
            self._drop(event.reason, event.trajectories)

    def _trajectory_started(self, event: ev.TrajectoryStarted) -> None:
        self._open[event.trajectory] = _Open(event.t, dict.fromkeys(STAGES, 0.0))
        if event.held_out and (self.phase != "training" or (self.run and self.version >= self.run.steps)):
            self.phase = "evaluating"

    def _env_reset(self, event: ev.EnvironmentReset) -> None:
        self._environment_use.reset(event)
        if event.trajectory in self._open:
            started, stages = self._open[event.trajectory]
            stages["claim"] += max(0.0, event.t - event.seconds - started)
            stages["reset"] += event.seconds

    def _turn_done(self, event: ev.TurnDone) -> None:
        self._routes.add(event)
        if event.trajectory in self._open:
            stages = self._open[event.trajectory].stages
            queued = min(event.queue_s, event.generate_s)
            stages["queue"] += queued
            stages["generate"] += event.generate_s - queued
            stages["step"] += event.env_s

    def _scored(self, event: ev.Scored) -> None:
        if event.trajectory in self._open:
            self._open[event.trajectory].stages["score"] += event.seconds

    def _agent_played(self, event: ev.AgentPlayed) -> None:
        if not event.held_out:
            self._task(event.task).agent_played(event)

    def _trajectory_ended(self, event: ev.TrajectoryEnded) -> None:
        known = self._open.pop(event.trajectory, None)
        stages = known.stages if known else dict.fromkeys(STAGES, 0.0)
        if event.held_out:
            self.played += 1
            return
        stages["other"] = max(0.0, event.seconds - sum(stages.values()))
        ended = self._task(event.task).ended(event, stages)
        self._count += 1
        slow = (event.seconds, self._count, ended)
        if len(self._slowest) < _SLOWEST:
            heapq.heappush(self._slowest, slow)
        else:
            heapq.heappushpop(self._slowest, slow)
        if not event.outcome.trainable:
            self._drop(event.outcome.value, 1)

    def _batch_taken(self, event: ev.BatchTaken) -> None:
        self.waited_s += event.waited_s
        self._batches[event.step] = event

    def _step_done(self, event: ev.StepDone) -> None:
        self.version, self.played = event.version, 0
        self._step_times.append(event.t)
        self._trainer.add(event.t, event.seconds, event.seconds)
        batch = self._batches.pop(event.version - 1, None)
        self._rl_end = self._totals()
        rewards = {task.name: mean(task.since_step) for task in self.tasks.values()}
        for task in self.tasks.values():
            task.since_step.clear()
        self.history.append(
            StepPoint(
                version=event.version,
                t=event.t,
                seconds=event.seconds,
                waited_s=batch.waited_s if batch else 0.0,
                tokens=event.tokens,
                trajectories=batch.trajectories if batch else 0,
                staleness=batch.staleness if batch else {},
                metrics=self._values.since_step(event.t),
                rewards={name: value for name, value in rewards.items() if value is not None},
                values=event.values,
                gaps=event.gaps,
            )
        )
        self.staleness.update(self.history[-1].staleness)

    def _engine_sample(self, event: ev.EngineSample) -> None:
        last = self._engines.get(event.engine)
        if last and event.busy_s >= last.busy_s:
            self._engine.add(event.t, event.busy_s - last.busy_s, event.t - last.t)
        self._engines[event.engine] = event

    def _pipeline_sample(self, event: ev.PipelineSample) -> None:
        last = self._sampled
        self.pipeline = PipelineCounts(event.running, event.scoring, event.ready, event.training)
        self._sampled = event
        if last and event.processes:
            seconds = event.t - last.t
            self._sampled_s += seconds
            self._environments.add(event.t, seconds * event.environments / event.processes, seconds)

    def _evaluated(self, event: ev.Evaluated) -> None:
        point = HeldOutPoint(
            version=event.version,
            t=event.t,
            success=event.success,
            reward=event.reward,
            episodes=event.episodes,
            failed=event.failed,
            final=event.final,
            samples=event.samples,
            passed=event.passed,
        )
        points = self._task(event.task).held_out
        # A run that was killed before its first checkpoint plays the same evaluation again.
        points[:] = [old for old in points if (old.version, old.final) != (point.version, point.final)]
        points.append(point)

    def _quarantined(self, event: ev.Quarantined) -> None:
        self._environment_use.quarantined(event)
        self._task(event.task).out = event.reason
        self.warnings.append(f"task {event.task} is in quarantine: {event.reason}")

    def _released(self, event: ev.Released) -> None:
        self._task(event.task).out = ""
        self.warnings.append(f"task {event.task} works again and is back in the mixture after {event.seconds:.0f} s")

    def _warned(self, event: ev.Warned) -> None:
        self.warnings.append(event.message)

    def _eta(self, now: float) -> float | None:
        times = self._step_times
        if self.run is None or len(times) < 2:
            return None
        period = (times[-1] - times[0]) / (len(times) - 1)
        return max(0.0, (self.run.steps - self.version) * period - (now - times[-1]))

    def snapshot(self, now: float | None = None) -> Snapshot:
        """What is known at `now`, by default the time of the last event."""
        now = self.t if now is None else max(now, self.t)
        run = self.run or ev.RunStarted(name="", preset="", alpha=0, seed=0, steps=0, tasks=[])
        rl = self._rl()
        seconds, engines = max(rl["seconds"], 1e-9), max(1, len(self._engines))
        return Snapshot(
            name=run.name,
            preset=run.preset,
            alpha=run.alpha,
            seed=run.seed,
            phase=self.phase,
            played=self.played,
            t=now,
            step=self.version,
            steps=run.steps,
            resumes=self.resumes,
            eta_s=self._eta(now),
            warmup=self.warmup,
            tasks=tuple(task.snapshot() for task in self.tasks.values()),
            pipeline=self.pipeline,
            recent_use=Utilisation(
                engine=min(1.0, self._engine.per_second(now) / engines),
                trainer=min(1.0, self._trainer.per_second(now)),
                environments=min(1.0, self._environments.per_second(now)),
            ),
            use=Utilisation(
                engine=min(1.0, rl["engine_busy_s"] / engines / seconds),
                trainer=min(1.0, rl["trainer_busy_s"] / seconds),
                environments=rl["environments_busy_s"] / rl["sampled_s"] if rl["sampled_s"] else 0.0,
            ),
            waited_s=self.waited_s,
            rl_s=rl["seconds"],
            staleness={age: count for age, count in sorted(self.staleness.items()) if count},
            drops=dict(self.drops.most_common()),
            trained=sum(self.staleness.values()),
            metrics=self._values.snapshot(now, rl, seconds),
            values=self.history[-1].values if self.history else {},
            history=tuple(self.history),
            slowest=tuple(ended for _, _, ended in sorted(self._slowest, reverse=True)),
            warnings=tuple(self.warnings),
            routes=self._routes.snapshot(),
            places=tuple(self._places.values()),
            swaps=self._swaps.snapshot(),
            emulated=tuple(run.emulated),
            work=run.work,
            model=run.model,
            environments=self._environment_use.snapshot(),
            rewards=self._reward_use.snapshot(),
        )


def measure(log: Iterable[ev.AnyEvent], end: Callable[[Metrics], Iterable[ev.AnyEvent]] | None = None) -> Snapshot:
    """The whole log at once; `end` gives the events that it lacks."""
    metrics = Metrics()
    for event in log:
        metrics.fold(event)
    for event in end(metrics) if end is not None else ():
        metrics.fold(event)
    return metrics.snapshot()
