"""Makes the event log of a run that never happened but could have: consistent times, counts, versions and outcomes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollart.core import events as ev
from rollart.core.event_log import EventLog
from rollart.core.types import LogprobGap, Outcome

PROCESSES = 24


@dataclass
class SampleRun:
    """Steps of a fixed mixture, trajectories in processes, a trainer that waits for whole groups, alpha 1."""

    seed: int = 0
    steps: int = 40
    groups: int = 2
    members: int = 4
    tasks: dict[str, int] = field(default_factory=lambda: {"frozen_lake": 6, "sokoban": 9, "arithmetic": 1})
    failures: float = 0.03
    log: list[ev.AnyEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.done = [0.0]
        self.count = 0
        self.intervals: list[tuple[float, float]] = []

    def put(self, t: float, event: ev.AnyEvent) -> None:
        event.t = round(t, 6)
        self.log.append(event)

    def make(self) -> list[ev.AnyEvent]:
        names = list(self.tasks)
        self.put(
            0,
            ev.RunStarted(
                name="sample", preset="rollart", alpha=1, seed=self.seed, steps=self.steps, tasks=names, wall=1.7e9
            ),
        )
        for number, role in enumerate(("engine", "trainer")):
            self.put(1 + number, ev.ServiceStarted(role=role, name=f"{role}-0", pid=100 + number, seconds=0.9))
        for step in range(1, 11):
            self.put(2 + step * 0.5, ev.WarmupStep(step=step * 60, steps=600, loss=3 / step))
        start = self.evaluate(7.5, 0, final=True)
        self.done[0] = start
        free = [start] * PROCESSES
        for step in range(self.steps):
            self.step(step, free)
            if (step + 1) % 10 == 0:
                self.evaluate(self.done[-1], step + 1, final=step + 1 == self.steps)
        self.samples()
        end = max(event.t for event in self.log)
        self.put(end + 0.1, ev.RunEnded(version=self.steps, reason="finished"))
        self.log.sort(key=lambda event: event.t)
        return self.log

    def skill(self, version: int, task: str) -> float:
        hard = 1 + list(self.tasks).index(task)
        return 0.9 * (1 - 2 ** (-version * 6 / self.steps / hard)) + 0.1

    def evaluate(self, t: float, version: int, *, final: bool) -> float:
        end = t
        for task in self.tasks:
            results = [self.trajectory(t, task, "", version, held_out=True) for _ in range(8)]
            end = max(end, *(result[0] for result in results))
        for task in self.tasks:
            success = round(self.skill(version, task), 3)
            self.put(
                end,
                ev.Evaluated(
                    version=version, task=task, episodes=8, success=success, reward=success, failed=0, final=final
                ),
            )
        return end

    def version_at(self, t: float) -> int:
        return sum(done <= t for done in self.done) - 1

    def trajectory(
        self, t: float, task: str, group: str, version: int, *, held_out: bool = False
    ) -> tuple[float, Outcome]:
        name = f"{task[:2]}{self.count:05d}"
        self.count += 1
        start, rng, tokens = t, self.random, 0
        self.put(t, ev.TrajectoryStarted(trajectory=name, task=task, group=group, version=version, held_out=held_out))
        reset = rng.uniform(0.01, 0.1)
        t += reset
        self.put(t, ev.EnvironmentReset(trajectory=name, task=task, seconds=reset))
        turns = rng.randint(1, self.tasks[task])
        outcome = Outcome.ENV_FAILED if not held_out and rng.random() < self.failures else Outcome.FINISHED
        for turn in range(turns):
            generate, env = rng.uniform(0.05, 0.3), rng.lognormvariate(-3, 1)
            made = rng.randint(3, 40)
            tokens += made
            t += generate + env
            self.put(
                t,
                ev.TurnDone(
                    trajectory=name,
                    task=task,
                    turn=turn,
                    engine="engine-0",
                    prompt=80 * (turn + 1),
                    cached=80 * turn,
                    tokens=made,
                    version=self.version_at(t),
                    queue_s=generate / 10,
                    generate_s=generate,
                    env_s=env,
                ),
            )
        success = None
        if outcome is Outcome.FINISHED:
            success = rng.random() < self.skill(version, task)
            t += 0.02
            self.put(t, ev.Scored(trajectory=name, task=task, seconds=0.02))
        self.put(
            t,
            ev.TrajectoryEnded(
                trajectory=name,
                task=task,
                group=group,
                outcome=outcome,
                turns=turns,
                tokens=tokens,
                seconds=t - start,
                reward=None if success is None else float(success),
                success=success,
                held_out=held_out,
                reason="" if success is not None else "the environment process died",
            ),
        )
        self.intervals.append((start, t))
        return t, outcome

    def group(self, number: int, task: str, free: list[float], earliest: float) -> float:
        name = f"g{number}"
        started = max(earliest, min(free))
        version = self.version_at(started)
        self.put(started, ev.GroupStarted(group=name, task=task, seed=number, members=self.members, version=version))
        left, ready = self.members, started
        while left:
            process = free.index(min(free))
            end, outcome = self.trajectory(max(started, free[process]), task, name, version)
            free[process] = end
            ready = max(ready, end)
            left -= outcome.trainable
        self.put(ready, ev.GroupReady(group=name, task=task, seconds=ready - started))
        return ready

    def step(self, step: int, free: list[float]) -> None:
        earliest = self.done[max(0, step - 1)]
        number = step * 100
        if step % 7 == 6:
            lost = self.group(number + 99, next(iter(self.tasks)), free, earliest)
            self.put(
                lost,
                ev.GroupDropped(
                    group=f"g{number + 99}", task=next(iter(self.tasks)), reason="stale", trajectories=self.members
                ),
            )
        ready = 0.0
        for task in self.tasks:
            for _ in range(self.groups):
                ready = max(ready, self.group(number, task, free, earliest))
                number += 1
        idle = self.done[-1]
        taken = max(ready, idle)
        trained = self.groups * self.members * len(self.tasks)
        ages = {0: trained - 3, 1: 3} if step else {0: trained}
        self.put(
            taken,
            ev.BatchTaken(
                step=step,
                ids=[f"g{step * 100 + number}" for number in range(len(self.tasks) * self.groups)],
                groups=dict.fromkeys(self.tasks, self.groups),
                trajectories=trained,
                tokens=900,
                waited_s=taken - idle,
                staleness=ages,
            ),
        )
        seconds = self.random.uniform(0.3, 0.6)
        end = taken + seconds
        self.put(
            end,
            ev.StepDone(
                version=step + 1,
                seconds=seconds,
                tokens=900,
                values={"loss": 1 / (step + 1), "entropy": 0.7},
                tasks={task: {"entropy": 0.5 + 0.1 * number} for number, task in enumerate(self.tasks)},
                gaps=tuple(
                    LogprobGap(task, age, 100 + 100 * step, 0.01 * age, 0.1) for task in self.tasks for age in (0, 1)
                ),
            ),
        )
        self.put(end + 0.05, ev.Published(version=step + 1, seconds=0.05))
        self.put(end + 0.08, ev.EngineSwapped(engine="engine-0", version=step + 1, seconds=0.01))
        if step % 10 == 9:
            self.put(end + 0.2, ev.Checkpointed(version=step + 1, seconds=0.15))
        self.done.append(end)

    def samples(self) -> None:
        busy, last = 0.0, max(event.t for event in self.log)
        for second in range(1, int(last * 2)):
            t = second / 2
            running = sum(start <= t < end for start, end in self.intervals)
            busy += 0.5 * min(1.0, running / 16)
            self.put(
                t,
                ev.EngineSample(
                    engine="engine-0",
                    version=max(0, self.version_at(t)),
                    running=running,
                    waiting=max(0, running - 16),
                    kv_bytes=running << 20,
                    prefilled=second * 900,
                    generated=second * 300,
                    busy_s=busy,
                ),
            )
            self.put(
                t,
                ev.PipelineSample(
                    running=running,
                    scoring=running // 8,
                    ready=running // 2,
                    training=24,
                    environments=running,
                    processes=PROCESSES * 2,
                ),
            )


def sample_run(**choices: object) -> list[ev.AnyEvent]:
    return SampleRun(**choices).make()  # type: ignore[arg-type]


def write_log(path: Path, events: Sequence[ev.AnyEvent]) -> None:
    """A log in which the events have the times that they have."""
    times = iter([0.0, *(event.t for event in events)])
    log = EventLog(path, lambda: next(times))
    for event in events:
        log.emit(event)
    log.close()
