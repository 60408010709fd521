"""Which processes a run would start, and how its batches are filled; nothing is started to find out."""

import os
from collections.abc import Iterator
from dataclasses import dataclass

from rollart.config import RunFile
from rollart.rollout.mixture import Mixture


@dataclass(frozen=True, slots=True)
class Place:
    """`processes` of one role, each with `threads`. `elastic`: started when needed, up to that many."""

    role: str
    name: str
    processes: int
    threads: int
    device: str
    elastic: bool
    about: str


@dataclass(frozen=True, slots=True)
class Placement:
    places: tuple[Place, ...]
    cores: int
    compute_threads: int
    batch: dict[str, int]
    group_size: int
    in_flight: int

    @property
    def warning(self) -> str | None:
        if self.compute_threads <= self.cores:
            return None
        return (
            f"engine and trainer ask for {self.compute_threads} threads, this machine has {self.cores} cores; "
            "they will slow each other down"
        )


def plan(run: RunFile) -> Placement:
    training, schedule = run.training, run.rollout.schedule()
    batches = 1 if schedule.one_batch else schedule.alpha + 1
    groups = batches * training.batch_groups + schedule.extra_groups * len(run.tasks)
    return Placement(
        places=tuple(_places(run)),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        compute_threads=run.engine.count * run.engine.threads + training.threads,
        batch=Mixture({task.name: task.weight for task in run.tasks}, training.batch_groups).quota(0),
        group_size=training.group_size,
        in_flight=groups * (training.group_size + schedule.extra_members),
    )


def _places(run: RunFile) -> Iterator[Place]:
    yield Place(
        "control",
        "controller",
        1,
        1,
        "cpu",
        False,
        f"preset {run.rollout.preset}, alpha {run.rollout.schedule().alpha}",
    )
    engine = run.engine
    about = f"{engine.max_batch} sequences at once, {engine.kv_megabytes} MB KV, {engine.dtype}"
    yield Place("generate", "engine", engine.count, engine.threads, engine.device, False, about)
    about = f"{run.training.steps} steps, {run.training.algorithm.advantage} + {run.training.algorithm.loss}"
    yield Place("train", "trainer", 1, run.training.threads, "cpu", False, about)
    for task in run.tasks:
        yield Place("environment", task.name, run.environments.slots, 1, "cpu", True, task.env)
    yield Place("reward", "rewards", run.rewards.workers, 1, "cpu", True, "ends when idle")
