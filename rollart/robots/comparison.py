"""Compares policies: every policy on every task with every seed, trained in stacks and evaluated as they finish.

A job is one policy for some pairs of task and seed whose sizes are equal. `jobs` of them run at a time, each with one
trainer, then one environment process, so each keeps one core busy. Every policy learns a stack before the next stack
begins, so a comparison that was stopped still compares like with like. Tasks come before seeds: those that fill a stack
have one seed after the other, those that share their sizes with few others have several seeds in one stack. Results are
appended to `results.jsonl` as they come; one that is started again in the same folder does only what is missing.
"""

import asyncio
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
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
from rollart.robots.service import RobotTrainerClient, trainer
from rollart.robots.suites import robot_task, sizes_of

RESULTS = "results.jsonl"
_CALL_STEPS = 100  # of one call of the trainer


class ComparedPolicy(msgspec.Struct, frozen=True):
    """One trained policy. `step_ms` is the CPU time of its share of a training step."""

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


async def compare(
    plan: ComparisonFile, folder: Path, on_result: OnResult, seconds: float | None = None
) -> list[ComparedPolicy]:
    """All results, those that were there included. After `seconds` no job begins. Raises RollartError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.yaml").write_text(loading.dump(plan))
    tasks = [robot_task(task, points=plan.control.cloud) for task in _unfinished(plan, results_in(folder))]
    if not tasks:
        return results_in(folder)  # no family need be installed
    # Environments live until the end: to start one takes as long as some episodes.
    pool = EnvironmentPool(tasks, plan.environments.model_copy(update={"processes": plan.jobs}))
    launcher = LocalLauncher()
    try:
        await _Comparison(plan, folder, launcher, pool, on_result).run(math.inf if seconds is None else seconds)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        await pool.close()
        await launcher.close()
    return results_in(folder)


class _Comparison:
    def __init__(
        self, plan: ComparisonFile, folder: Path, launcher: Launcher, pool: EnvironmentPool, on_result: OnResult
    ) -> None:
        self._plan, self._folder, self._launcher, self._pool = plan, folder, launcher, pool
        self._on_result = on_result
        self._room = asyncio.Semaphore(plan.jobs)

    async def run(self, seconds: float) -> None:
        """Demonstrations are recorded for some seeds, while the last jobs of those before run."""
        plan, loop = self._plan, asyncio.get_running_loop()
        ends = loop.time() + seconds
        done = {(one.policy, one.task, one.seed) for one in results_in(self._folder)}
        async with asyncio.TaskGroup() as group:
            for pairs in _rounds(plan):
                left = [
                    (task, seed)
                    for task, seed in pairs
                    if any((policy, task, seed) not in done for policy in plan.policies)
                ]
                members = [await _member(plan, self._folder, *pair) for pair in left if loop.time() < ends]
                for job in _jobs(plan, members, done):
                    await self._room.acquire()
                    if loop.time() >= ends:
                        return
                    group.create_task(self._run(job))

    async def _run(self, job: _Job) -> None:
        plan = self._plan
        config = LearnerConfig(policy=job.policy, control=plan.control, network=plan.network, training=plan.training)
        spec = {
            "data": [str(one.data.absolute()) for one in job.members],
            "episodes": plan.demonstrations.episodes,
            "seeds": [one.seed for one in job.members],
            "tasks": [one.task for one in job.members],
        }
        name = f"{job.name}-{job.members[0].task.replace(':', '-')}-{job.members[0].seed}"
        logs = self._folder / "logs"
        try:
            with tempfile.TemporaryDirectory(dir=self._folder, prefix=".policies-") as made:
                paths = [Path(made) / str(number) for number in range(len(job.members))]
                async with trainer(self._launcher, spec, config=config, logs=logs, name=name, sink=NULL_SINK) as client:
                    step_ms = await _train(client, plan.training.steps) / len(job.members)
                    await client.export(paths)
                for member, path in zip(job.members, paths, strict=True):
                    await self._evaluate(job.name, member, path, step_ms)
        finally:
            self._room.release()

    async def _evaluate(self, policy: str, member: _Member, path: Path, step_ms: float) -> None:
        plan = self._plan
        score = await evaluate(
            TrainedPolicy(path),
            self._pool,
            robot_task(member.task, points=plan.control.cloud),
            episodes=plan.evaluation.episodes,
            seed=plan.seed,
            parallel=1,
        )
        result = ComparedPolicy(
            policy=policy,
            task=member.task,
            seed=member.seed,
            success=score.success,
            episodes=len(score.played),
            unplayed=len(score.episodes) - len(score.played),
            p50_ms=score.latency_ms[0],
            p99_ms=score.latency_ms[1],
            step_ms=step_ms,
        )
        with (self._folder / RESULTS).open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")
        self._on_result(result)


def _unfinished(plan: ComparisonFile, results: Sequence[ComparedPolicy]) -> list[str]:
    """The tasks that some policy has yet to learn with some seed."""
    done = {(one.task, one.policy, one.seed) for one in results}
    seeds = range(plan.seed, plan.seed + plan.seeds)
    return [task for task in plan.tasks if any((task, *pair) not in done for pair in product(plan.policies, seeds))]


async def _train(client: RobotTrainerClient, steps: int) -> float:
    """Returns the trainer's CPU milliseconds for one step: a busy machine does not change them."""
    began = await client.cpu_seconds()
    for start in range(0, steps, _CALL_STEPS):
        await client.train(min(_CALL_STEPS, steps - start))
    return 1e3 * (await client.cpu_seconds() - began) / steps


async def _member(plan: ComparisonFile, folder: Path, task: str, seed: int) -> _Member:
    """With its demonstrations, recorded unless they are there. Of files, all seeds take the first episodes."""
    path, wanted = folder / "demonstrations" / f"{task.replace(':', '-')}-{seed}.npz", plan.demonstrations
    if not path.exists():
        if robot_task(task).player is not None:
            limits = plan.environments.model_copy(update={"processes": 1})  # jobs run meanwhile
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
            file = demonstrations.file_of(wanted.path, task)
            found = demonstrations.load_for(task, file, wanted.episodes, plan.control.cloud)
        demonstrations.save(path, found)
    return _Member(task, seed, path, sizes_of(task, plan.control.cloud))


def _rounds(plan: ComparisonFile) -> Iterator[list[tuple[str, int]]]:
    """Pairs of task and seed, in the order in which they are done: as many seeds of tasks with equal sizes as fill a
    stack."""
    sizes = {task: sizes_of(task, plan.control.cloud) for task in plan.tasks}
    alike = {size: [task for task in plan.tasks if sizes[task] == size] for size in sizes.values()}
    seeds = range(plan.seed, plan.seed + plan.seeds)
    for start, tasks in product(range(plan.seeds), alike.values()):
        together = max(1, plan.stack // len(tasks))
        if start % together == 0:
            yield [(task, seed) for seed, task in product(seeds[start : start + together], tasks)]


def _jobs(plan: ComparisonFile, members: Sequence[_Member], done: set[tuple[str, str, int]]) -> Iterator[_Job]:
    """Every policy for a stack, then the next stack."""
    for _, alike in groupby(sorted(members, key=lambda one: one.sizes), key=lambda one: one.sizes):
        same = list(alike)
        for some in (same[start : start + plan.stack] for start in range(0, len(same), plan.stack)):
            for name, policy in plan.policies.items():
                left = tuple(one for one in some if (name, one.task, one.seed) not in done)
                if left:
                    yield _Job(name, policy, left)
