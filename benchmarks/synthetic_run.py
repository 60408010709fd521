"""The event log of a large finished run that never happened, for benchmarks of what reads logs."""

import random
from pathlib import Path

from rollart.core import events as ev
from rollart.core.event_log import EventLog
from rollart.core.types import Outcome

TASKS = ("frozen_lake", "swe", "webshop", "column_sum")
TURNS, GROUP = 10, 8


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def synthetic(folder: Path, turns: int, batch: int = 512) -> int:
    """A finished run with that many turns; returns the number of its steps."""
    folder.mkdir(parents=True)
    clock, rng = Clock(), random.Random(0)
    log = EventLog(folder / "events", clock)
    steps = max(2, turns // TURNS // batch)
    log.emit(ev.RunStarted(name="big", preset="rollart", alpha=1, seed=0, steps=steps, tasks=list(TASKS), wall=1.7e9))
    for step in range(steps):
        ids = _rollout(log, clock, rng, step, batch)
        log.emit(_taken(step, ids, batch))
        clock.now += 4.0
        values = {"loss": rng.gauss(0.1, 0.02), "grad_norm": rng.random(), "entropy": 1 / (1 + step / 50)}
        log.emit(ev.StepDone(version=step + 1, seconds=3.8, tokens=batch * 900, values=values, tasks={}))
        log.emit(ev.Published(version=step + 1, seconds=0.2, bytes=10**9))
        for engine in range(4):
            log.emit(ev.EngineSwapped(engine=f"engine-{engine}", version=step + 1, seconds=0.8, bytes=10**9))
        if step % 20 == 0:
            for task in TASKS:
                success = 1 - 0.8 ** (1 + step / 20)
                result = ev.Evaluated(version=step, task=task, episodes=100, success=success, reward=0.5, failed=0)
                log.emit(result)
    log.emit(ev.RunEnded(version=steps, reason="finished"))
    log.close()
    return steps


def _taken(step: int, ids: list[str], batch: int) -> ev.BatchTaken:
    return ev.BatchTaken(
        step=step,
        ids=ids,
        groups=dict.fromkeys(TASKS, 1),
        trajectories=batch,
        tokens=batch * 900,
        waited_s=1.0,
        staleness={0: batch // 2, 1: batch - batch // 2},
    )


def _rollout(log: EventLog, clock: Clock, rng: random.Random, step: int, batch: int) -> list[str]:
    """The trajectories of one batch, a turn of each after the other; returns the ids of their groups."""
    names = [(f"s{step:06d}-{n // GROUP:04d}", n % GROUP, TASKS[n // GROUP % len(TASKS)]) for n in range(batch)]
    for group, member, task in names:
        id = f"{group}.{member}"
        log.emit(ev.TrajectoryStarted(trajectory=id, task=task, group=group, version=max(0, step - member % 2)))
        log.emit(ev.EnvironmentReset(trajectory=id, task=task, seconds=0.2))
        clock.now += 0.001
    for turn in range(TURNS):
        for number, (group, member, task) in enumerate(names):
            clock.now += 0.0008
            log.emit(
                ev.TurnDone(
                    trajectory=f"{group}.{member}",
                    task=task,
                    turn=turn,
                    engine=f"engine-{number % 4}",
                    prompt=200 * (turn + 1),
                    cached=200 * turn,
                    tokens=40,
                    version=step,
                    queue_s=rng.random() * 0.05,
                    generate_s=rng.random(),
                    env_s=rng.random() * 0.5,
                    pool="h20",
                    why="lowest predicted time",
                )
            )
        log.emit(ev.PipelineSample(running=batch, scoring=0, ready=0, training=0, environments=batch, processes=batch))
        for engine in range(4):
            log.emit(_engine_sample(f"engine-{engine}", clock.now, step))
    for group, member, task in names:
        clock.now += 0.0005
        log.emit(_ended(f"{group}.{member}", group, task, rng))
    return sorted({group for group, _, _ in names})


def _engine_sample(engine: str, t: float, version: int) -> ev.EngineSample:
    return ev.EngineSample(
        engine=engine,
        version=version,
        running=100,
        waiting=4,
        kv_bytes=10**9,
        prefilled=1000,
        generated=1000,
        busy_s=t * 0.8,
        kv_budget=4 * 10**9,
    )


def _ended(id: str, group: str, task: str, rng: random.Random) -> ev.TrajectoryEnded:
    return ev.TrajectoryEnded(
        trajectory=id,
        task=task,
        group=group,
        outcome=Outcome.FINISHED,
        turns=TURNS,
        tokens=900,
        seconds=8.0,
        reward=rng.random(),
        success=rng.random() > 0.5,
    )
