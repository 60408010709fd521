"""A run of imitation: demonstrations, a trainer process, checkpoints, evaluations while it trains, one event log.

The run folder holds

    run.yaml              the run file with all defaults
    demonstrations.npz    what is imitated
    events/               the event log, which every view reads
    checkpoints/001000    the trainer's state; the newest is kept
    policy/               the trained policy, by the moving average of its weights
    score.json            the last evaluation

Invariants: one evaluation runs at a time, beside the training; a run that was interrupted goes on from its newest
checkpoint with the same batches and noise, so it ends as if it had not been.
"""

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from rollart.config import loading
from rollart.config.robots import RobotRunFile
from rollart.core import run_folder
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog
from rollart.core.events import Checkpointed, Evaluated, RunEnded, RunStarted, WarmupStep, WorkStarted
from rollart.envs.pool import EnvironmentPool
from rollart.launch.local import LocalLauncher
from rollart.observe.report import wilson
from rollart.robots import demonstrations
from rollart.robots.episodes import RobotScore, evaluate
from rollart.robots.learner import MANIFEST, LearnerConfig, TrainedPolicy
from rollart.robots.record import record
from rollart.robots.service import ImitationClient, trainer
from rollart.robots.suites import robot_task

REPORT_EVERY = 50  # steps between two progress events
OnLog = Callable[[EventLog], None]


def load(path: Path, overrides: list[str]) -> RobotRunFile:
    """The run file. Raises ConfigError, also if its task does not exist."""
    run = loading.validated(loading.read(path, overrides), RobotRunFile)
    robot_task(run.task)
    return run


async def train(run: RobotRunFile, folder: Path, *, resume: bool, on_log: OnLog) -> RobotScore:
    """Returns the final evaluation. Raises RollartError."""
    folder.mkdir(parents=True, exist_ok=True)
    done = _newest_checkpoint(folder) if resume else None
    async with AsyncExitStack() as stack:
        stack.enter_context(run_folder.exclusive(folder))
        (folder / "run.yaml").write_text(loading.dump(run))
        log = EventLog(folder / "events", time.monotonic)
        stack.callback(log.close)
        on_log(log)
        log.emit(_started(run, int(done.name) if done else 0, resume))
        try:
            score = await _Imitation(run, folder, log, stack).train(done)
        except BaseException as error:
            log.emit(RunEnded(version=0, reason=str(error) or type(error).__name__))
            raise
        log.emit(RunEnded(version=run.training.steps, reason="finished"))
        return score


class _Imitation:
    def __init__(self, run: RobotRunFile, folder: Path, log: EventLog, stack: AsyncExitStack) -> None:
        self._run, self._folder, self._log, self._stack = run, folder, log, stack
        self._task = robot_task(run.task)
        self._pool = EnvironmentPool(
            [self._task], run.environments, log=folder / "logs" / "environments.log", urls=run.urls, sink=log
        )
        self._evaluating: asyncio.Task[RobotScore] | None = None

    async def train(self, checkpoint: Path | None) -> RobotScore:
        run, folder, stack = self._run, self._folder, self._stack
        (folder / "logs").mkdir(exist_ok=True)
        data = await self._demonstrations()
        stack.push_async_callback(self._pool.close)
        await self._pool.start()
        launcher = LocalLauncher()
        stack.push_async_callback(launcher.close)
        config = LearnerConfig(policy=run.policy, control=run.control, network=run.network, training=run.training)
        spec = {
            "data": [str(data.absolute())],
            "episodes": run.demonstrations.episodes,
            "seeds": [run.seed],
            "tasks": [run.task],
            "checkpoint": str(checkpoint.absolute()) if checkpoint else None,
        }
        client = await stack.enter_async_context(
            trainer(launcher, spec, config=config, logs=folder / "logs", name="trainer", sink=self._log)
        )
        stack.push_async_callback(self._stop_evaluating)
        await self._steps(client, int(checkpoint.name) if checkpoint else 0)
        await client.export([folder / "policy"])
        await self._evaluated()
        score = await self._evaluate(folder / "policy", run.training.steps, run.evaluation.episodes, final=True)
        save_score(score, folder)
        return score

    async def _demonstrations(self) -> Path:
        """The run's own copy, so that a resume sees the same."""
        run, copy = self._run, self._folder / "demonstrations.npz"
        if not copy.exists():
            wanted = run.demonstrations
            if wanted.path is not None:
                found = demonstrations.load(wanted.path, wanted.episodes)
            else:
                recorded = await record(
                    run.task, wanted.episodes, run.seed, config=run.environments, deadline=wanted.deadline
                )
                found = list(recorded.demonstrations)
            demonstrations.save(copy, found)
        return copy

    async def _steps(self, client: ImitationClient, step: int) -> None:
        training, every = self._run.training, self._run.evaluation.every
        while step < training.steps:
            stops = [REPORT_EVERY, training.checkpoint_every, *([every] if every else [])]
            following = min(min((step // stop + 1) * stop for stop in stops), training.steps)
            (loss,) = await client.train(following - step)
            step = following
            self._log.emit(WarmupStep(step=step, steps=training.steps, loss=loss))
            if step % training.checkpoint_every == 0:
                await self._checkpoint(client, step)
            if every and step % every == 0 and step < training.steps:
                await self._evaluated()
                await client.export([self._folder / "policy"])
                self._evaluating = asyncio.create_task(
                    self._evaluate(self._folder / "policy", step, self._run.evaluation.quick)
                )

    async def _checkpoint(self, client: ImitationClient, step: int) -> None:
        began = time.monotonic()
        folder = self._folder / "checkpoints"
        await client.save(folder / f"{step:06d}")
        for old in folder.iterdir():
            if old.name.isdigit() and int(old.name) < step:
                shutil.rmtree(old)
        seconds = time.monotonic() - began
        self._log.emit(Checkpointed(version=step, seconds=seconds, blocked_s=seconds))

    async def _evaluate(self, path: Path, step: int, episodes: int, *, final: bool = False) -> RobotScore:
        policy = TrainedPolicy(path)  # read at once: the next export replaces it
        self._log.emit(WorkStarted(work="evaluation", version=step))
        score = await evaluate(
            policy, self._pool, self._task,
            episodes=episodes, seed=self._run.seed, parallel=self._run.environments.processes,
        )  # fmt: skip
        self._log.emit(evaluated(score, self._task.name, step, final=final))
        return score

    async def _evaluated(self) -> None:
        """Wait for the evaluation that runs beside the training."""
        running, self._evaluating = self._evaluating, None
        if running is not None:
            await running

    async def _stop_evaluating(self) -> None:
        if self._evaluating is not None:
            self._evaluating.cancel()
            await asyncio.wait([self._evaluating])


def evaluated(score: RobotScore, task: str, step: int, *, final: bool) -> Evaluated:
    played = score.played
    return Evaluated(
        version=step,
        task=task,
        episodes=len(played),
        success=score.success,
        reward=sum(one.reward for one in played) / len(played),
        failed=len(score.episodes) - len(played),
        final=final,
    )


def save_score(score: RobotScore, folder: Path) -> None:
    low, high = wilson(score.success, len(score.played))
    about = {
        "success": score.success,
        "interval": [low, high],
        "episodes": len(score.played),
        "unplayed": len(score.episodes) - len(score.played),
        "latency_ms": {"p50": score.latency_ms[0], "p99": score.latency_ms[1]},
    }
    (folder / "score.json").write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=2))


async def score_run(
    folder: Path, *, episodes: int, task: str | None = None, processes: int | None = None, video: int = 0
) -> RobotScore:
    """Held-out episodes of a trained policy. `video`: film them, with that many pixels. Raises RollartError."""
    if not (folder / "run.yaml").is_file():
        raise RollartError(f"{folder} is not a run folder of `rollart robots train`: it has no run.yaml")
    run = load(folder / "run.yaml", [])
    played = robot_task(task or run.task, video=video)
    limits = run.environments.model_copy(update={"processes": processes} if processes else {})
    policy = TrainedPolicy(folder / "policy")
    pool = EnvironmentPool([played], limits, urls=run.urls)
    try:
        await pool.start()
        return await evaluate(policy, pool, played, episodes=episodes, seed=run.seed, parallel=limits.processes)
    finally:
        await pool.close()


def _started(run: RobotRunFile, step: int, resumed: bool) -> RunStarted:
    return RunStarted(
        name=run.name,
        preset="imitation",
        alpha=0,
        seed=run.seed,
        steps=run.training.steps,
        tasks=[robot_task(run.task).name],
        version=step,
        resumed=resumed,
        wall=time.time(),
        model=run.policy.name,
        work="imitation",
    )


def _newest_checkpoint(folder: Path) -> Path | None:
    found = folder / "checkpoints"
    entries = found.iterdir() if found.is_dir() else ()
    whole = [path for path in entries if path.name.isdigit() and (path / MANIFEST).is_file()]
    return max(whole, key=lambda path: int(path.name), default=None)
