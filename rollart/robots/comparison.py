"""Compares policies: every policy on every task with every seed, trained in stacks and evaluated as they finish.

A job is one policy for some pairs of task and seed whose sizes are equal. `jobs` of them run at a time, each with one
trainer, then one environment process, so each keeps one core busy. Results are appended to `results.jsonl` as they
come; a comparison that is started again in the same folder does only what is missing.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec

from rollart.config import loading
from rollart.config.robots import AnyPolicyConfig, ComparisonFile
from rollart.core.events import NULL_SINK
from rollart.envs.pool import EnvironmentPool
from rollart.launch.launcher import Launcher
from rollart.launch.local import LocalLauncher
from rollart.robots import demonstrations
from rollart.robots.episodes import evaluate
from rollart.robots.learner import LearnerConfig, TrainedPolicy
from rollart.robots.record import record
from rollart.robots.service import trainer
from rollart.robots.suites import robot_task

RESULTS = "results.jsonl"
_CALL_STEPS = 100  # of one call of the trainer


class ComparedPolicy(msgspec.Struct, frozen=True):
    """One trained policy. `step_ms` is the time of its share of a training step."""

    policy: str
    task: str
    seed: int
    success: float
    episodes: int
    unplayed: int
    p50_ms: float
    p99_ms: float
    step_ms: float


OnResult = Callable[[ComparedPolicy], None]


@dataclass(frozen=True, slots=True)
class _Member:
    task: str
    seed: int
    data: Path
    sizes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    policy: AnyPolicyConfig
    members: tuple[_Member, ...]


def load(path: Path, overrides: list[str]) -> ComparisonFile:
    """Raises ConfigError, also for a task that does not exist."""
    found = loading.validated(loading.read(path, overrides), ComparisonFile)
    for task in found.tasks:
        robot_task(task, points=found.control.cloud)
    return found


def results_in(folder: Path) -> list[ComparedPolicy]:
    path = folder / RESULTS
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=ComparedPolicy) for line in lines]


async def compare(plan: ComparisonFile, folder: Path, on_result: OnResult) -> list[ComparedPolicy]:
    """All results, those that were there included. Raises RollartError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.yaml").write_text(loading.dump(plan))
    done = {(one.policy, one.task, one.seed) for one in results_in(folder)}
    members = [await _member(plan, folder, task, plan.seed + seed) for task in plan.tasks for seed in range(plan.seeds)]
    jobs, room = list(_jobs(plan, members, done)), asyncio.Semaphore(plan.jobs)
    launcher = LocalLauncher()

    def finished(result: ComparedPolicy) -> None:
        with (folder / RESULTS).open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        on_result(result)

    async def run(job: _Job) -> None:
        async with room:
            await _run(plan, job, folder, launcher, finished)

    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(run(job))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        await launcher.close()
    return results_in(folder)


async def _member(plan: ComparisonFile, folder: Path, task: str, seed: int) -> _Member:
    """With its demonstrations, recorded unless they are there. Of files, all seeds take the first episodes."""
    path, wanted = folder / "demonstrations" / f"{task.replace(':', '-')}-{seed}.npz", plan.demonstrations
    if not path.exists():
        if robot_task(task).player is not None:
            limits = plan.environments.model_copy(update={"processes": plan.jobs})
            recorded = await record(
                task,
                wanted.episodes,
                seed,
                config=limits,
                deadline=wanted.deadline,
                points=plan.control.cloud,
            )
            found = list(recorded.demonstrations)
        else:
            found = demonstrations.load(demonstrations.file_of(wanted.path, task), wanted.episodes)
        demonstrations.save(path, found)
    first = demonstrations.load(path, wanted.episodes)[0]
    return _Member(task, seed, path, (first.observations.shape[1], first.actions.shape[1]))


def _jobs(plan: ComparisonFile, members: Sequence[_Member], done: set[tuple[str, str, int]]) -> Iterator[_Job]:
    for name, policy in plan.policies.items():
        left = [one for one in members if (name, one.task, one.seed) not in done]
        for _, alike in groupby(sorted(left, key=lambda one: one.sizes), key=lambda one: one.sizes):
            stack = tuple(alike)
            for start in range(0, len(stack), plan.stack):
                yield _Job(name, policy, stack[start : start + plan.stack])


async def _run(plan: ComparisonFile, job: _Job, folder: Path, launcher: Launcher, finished: OnResult) -> None:
    config = LearnerConfig(policy=job.policy, control=plan.control, network=plan.network, training=plan.training)
    spec = {
        "data": [str(one.data.absolute()) for one in job.members],
        "episodes": plan.demonstrations.episodes,
        "seeds": [one.seed for one in job.members],
        "tasks": [one.task for one in job.members],
    }
    with tempfile.TemporaryDirectory(dir=folder, prefix=".policies-") as made:
        paths = [Path(made) / str(number) for number in range(len(job.members))]
        name = f"{job.name}-{job.members[0].task.replace(':', '-')}-{job.members[0].seed}"
        async with trainer(launcher, spec, config=config, logs=folder / "logs", name=name, sink=NULL_SINK) as client:
            began = time.monotonic()
            for start in range(0, plan.training.steps, _CALL_STEPS):
                await client.train(min(_CALL_STEPS, plan.training.steps - start))
            step_ms = 1e3 * (time.monotonic() - began) / plan.training.steps / len(job.members)
            await client.export(paths)
        for task, group in groupby(zip(job.members, paths, strict=True), key=lambda pair: pair[0].task):
            await _evaluate(plan, job.name, task, [(one.seed, path) for one, path in group], step_ms, finished)


async def _evaluate(
    plan: ComparisonFile, policy: str, name: str, found: Sequence[tuple[int, Path]], step_ms: float, finished: OnResult
) -> None:
    task = robot_task(name, points=plan.control.cloud)
    pool = EnvironmentPool([task], plan.environments.model_copy(update={"processes": 1}))
    try:
        await pool.start()
        for seed, path in found:
            score = await evaluate(
                TrainedPolicy(path), pool, task, episodes=plan.evaluation.episodes, seed=plan.seed, parallel=1
            )
            finished(
                ComparedPolicy(
                    policy=policy,
                    task=name,
                    seed=seed,
                    success=score.success,
                    episodes=len(score.played),
                    unplayed=len(score.episodes) - len(score.played),
                    p50_ms=score.latency_ms[0],
                    p99_ms=score.latency_ms[1],
                    step_ms=step_ms,
                )
            )
    finally:
        await pool.close()
