"""What runs of robot policies share: pool, event log, checkpoints, evaluations, and how a trained policy is scored."""

import asyncio
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from rollart.config import loading
from rollart.config.robots import RobotRunFile
from rollart.core import run_folder
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog
from rollart.core.events import Checkpointed, Evaluated, RunEnded, RunStarted, WorkStarted
from rollart.envs.pool import EnvironmentPool
from rollart.launch.local import LocalLauncher
from rollart.observe.report import wilson
from rollart.robots.episodes import RobotScore, evaluate
from rollart.robots.learner import MANIFEST, LearnerConfig, TrainedPolicy
from rollart.robots.service import RobotTrainerClient, trainer
from rollart.robots.suites import robot_task

OnLog = Callable[[EventLog], None]


def load(path: Path, overrides: list[str]) -> RobotRunFile:
    """The run file. Raises ConfigError, also if its task does not exist."""
    run = loading.validated(loading.read(path, overrides), RobotRunFile)
    robot_task(run.task, points=run.control.cloud)
    return run


class RobotRun(ABC):
    """One run in its folder; subclasses define `_train`. Invariant: one evaluation runs at a time, beside the
    training."""

    work = ""

    def __init__(self, run: RobotRunFile, folder: Path, *, steps: int, alpha: int = 0) -> None:
        self._run, self._folder, self._count, self._alpha = run, folder, steps, alpha
        self._task = robot_task(run.task, points=run.control.cloud)
        self._stack = AsyncExitStack()
        self._checkpoints = folder / "checkpoints"
        self._evaluating: asyncio.Task[RobotScore] | None = None
        self._log: EventLog
        self._pool: EnvironmentPool

    async def run(self, *, resume: bool, on_log: OnLog) -> RobotScore:
        """Returns the final evaluation. Raises RollartError."""
        folder, run = self._folder, self._run
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        done = self._newest() if resume else None
        async with self._stack as stack:
            stack.enter_context(run_folder.exclusive(folder))
            (folder / "run.yaml").write_text(loading.dump(run))
            log = self._log = EventLog(folder / "events", time.monotonic)
            stack.callback(log.close)
            on_log(log)
            log.emit(self._started(int(done.name) if done else 0, resume))
            self._pool = EnvironmentPool(
                [self._task], run.environments, log=folder / "logs" / "environments.log", urls=run.urls, sink=log
            )
            try:
                score = await self._train(done)
            except BaseException as error:
                log.emit(RunEnded(version=0, reason=str(error) or type(error).__name__))
                raise
            log.emit(RunEnded(version=self._count, reason="finished"))
            return score

    def _newest(self) -> Path | None:
        """The checkpoint to resume from."""
        entries = self._checkpoints.iterdir() if self._checkpoints.is_dir() else ()
        whole = [path for path in entries if path.name.isdigit() and (path / MANIFEST).is_file()]
        return max(whole, key=lambda path: int(path.name), default=None)

    @abstractmethod
    async def _train(self, checkpoint: Path | None) -> RobotScore:
        """From a checkpoint, or from the start; returns the final evaluation."""

    async def _start(
        self, config: LearnerConfig, demonstrations: Path, checkpoint: Path | None, **more: object
    ) -> RobotTrainerClient:
        """The pool, and a trainer that learns from these demonstrations."""
        run, stack = self._run, self._stack
        stack.push_async_callback(self._pool.close)
        await self._pool.start()
        launcher = LocalLauncher()
        stack.push_async_callback(launcher.close)
        spec = {
            "data": [str(demonstrations.absolute())],
            "episodes": run.demonstrations.episodes,
            "seeds": [run.seed],
            "tasks": [run.task],
            "checkpoint": str(checkpoint.absolute()) if checkpoint else None,
            **more,
        }
        client = await stack.enter_async_context(
            trainer(launcher, spec, config=config, logs=self._folder / "logs", name="trainer", sink=self._log)
        )
        stack.push_async_callback(self._stop_evaluating)
        return client

    def _started(self, version: int, resumed: bool) -> RunStarted:
        run = self._run
        return RunStarted(
            name=run.name,
            preset=self.work,
            alpha=self._alpha,
            seed=run.seed,
            steps=self._count,
            tasks=[self._task.name],
            version=version,
            resumed=resumed,
            wall=time.time(),
            model=run.policy.name,
            work=self.work,
        )

    async def _checkpoint(self, client: RobotTrainerClient, version: int) -> None:
        began = time.monotonic()
        await client.save(self._checkpoints / f"{version:06d}")
        self._delete_before(version)
        seconds = time.monotonic() - began
        self._log.emit(Checkpointed(version=version, seconds=seconds, blocked_s=seconds))

    def _delete_before(self, version: int) -> None:
        for old in self._checkpoints.iterdir():
            if old.name.isdigit() and int(old.name) < version:
                shutil.rmtree(old)

    async def _evaluate(self, policy: TrainedPolicy, version: int, episodes: int, *, final: bool = False) -> RobotScore:
        self._log.emit(WorkStarted(work="evaluation", version=version))
        score = await evaluate(
            policy, self._pool, self._task,
            episodes=episodes, seed=self._run.seed, parallel=self._run.environments.processes,
        )  # fmt: skip
        self._log.emit(evaluated(score, self._task.name, version, final=final))
        return score

    async def _evaluate_beside(self, policy: TrainedPolicy, version: int) -> None:
        """A quick evaluation, while the training goes on; the one before ends first."""
        await self._evaluated()
        self._evaluating = asyncio.create_task(self._evaluate(policy, version, self._run.evaluation.quick))

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
    played = robot_task(task or run.task, points=run.control.cloud, video=video)
    limits = run.environments.model_copy(update={"processes": processes} if processes else {})
    policy = TrainedPolicy(folder / "policy")
    pool = EnvironmentPool([played], limits, urls=run.urls)
    try:
        await pool.start()
        return await evaluate(policy, pool, played, episodes=episodes, seed=run.seed, parallel=limits.processes)
    finally:
        await pool.close()
