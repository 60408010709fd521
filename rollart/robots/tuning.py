"""A run of RL that tunes an imitated policy: episodes with exploration, updates, checkpoints, one event log.

The run folder is that of an imitation, and holds besides

    start/         the policy that it started from
    before.json    its successes on the held-out episodes, by seed
    ledger.sqlite  groups and episodes, those of the last steps with their chunks

Scheduler, training loop and ledger are those for language, so an interrupted run goes on from its newest checkpoint
with every episode that was complete.
"""

import json
import math
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rollart.config.robots import RobotRunFile
from rollart.core import run_folder
from rollart.core.errors import ConfigError, RollartError
from rollart.core.events import Evaluated
from rollart.core.schedule import Schedule
from rollart.core.types import Batch, Publication, StepMetrics
from rollart.robots.episodes import RobotScore
from rollart.robots.exploration import ActingPolicy, RobotRunner, chunk_batch
from rollart.robots.learner import TrainedPolicy
from rollart.robots.run import OnLog, RobotRun, evaluated, load, save_score
from rollart.robots.service import RobotTrainerClient
from rollart.robots.tuning_learner import check_loss, learner_config
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.training_loop import LoopPlan, TrainingLoop
from rollart.rollout.trajectory import RolloutTask
from rollart.training.advantages import ADVANTAGES, of_whole_trajectories

_NORMAL_95 = 1.96
_KEPT_STEPS = 2  # whose episodes stay in the ledger after a checkpoint


@dataclass(frozen=True, slots=True)
class Gain:
    """Success on the same held-out episodes before and after, and half of the 95% interval of the difference."""

    before: float
    after: float
    half: float

    @property
    def mean(self) -> float:
        return self.after - self.before


def gain_of(before: dict[int, bool], after: dict[int, bool]) -> Gain:
    """Paired: of the episodes that were played both times. Raises RollartError if there are none."""
    pairs = [(before[seed], after[seed]) for seed in before if seed in after]
    if not pairs:
        raise RollartError("no held-out episode could be played both before and after the tuning")
    differences = [float(after) - float(before) for before, after in pairs]
    spread = stdev(differences) if len(pairs) > 1 else math.inf
    first, second = (fmean(map(float, side)) for side in zip(*pairs, strict=True))
    return Gain(first, second, _NORMAL_95 * spread / math.sqrt(len(pairs)))


def load_tuning(path: Path, overrides: list[str]) -> RobotRunFile:
    """The run file, if it can be tuned. Raises ConfigError."""
    run = load(path, overrides)
    check_loss(run.tuning.loss)
    if run.control.cloud:
        raise ConfigError("tuning needs `control.observation: state`: its scorer of candidates sees no point clouds")
    if not of_whole_trajectories(ADVANTAGES.find(run.tuning.advantage)):
        raise ConfigError(f"tuning.advantage: {run.tuning.advantage} needs turns or tokens; use grpo or rloo")
    return run


async def tune(run: RobotRunFile, folder: Path, *, start: Path | None, on_log: OnLog) -> Gain:
    """From `start`, the run folder of an imitation, or None: resume the tuning in `folder`. Raises RollartError."""
    if start is not None:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(start / "policy", folder / "start")
        shutil.copy(start / "demonstrations.npz", folder)
    else:
        _check_resumed(run, folder)
    with closing(SqliteLedger.open(folder / "ledger.sqlite", keep=_KEPT_STEPS)) as ledger:
        score = await _Tuning(run, folder, ledger).run(resume=start is None, on_log=on_log)
    before = {int(seed): won for seed, won in json.loads((folder / "before.json").read_text()).items()}
    return gain_of(before, _successes(score))


def imitated_run(run: RobotRunFile, start: Path | None) -> Path:
    """The run folder whose policy is tuned: `start`, or the newest of the run's name. Raises RollartError."""
    numbers = list(run_folder.numbered(run.output, run.name))
    found = start or (run.output / f"{run.name}-{max(numbers)}" if numbers else None)
    if found is None:
        raise RollartError(f"{run.output} holds no run of {run.name!r} to tune; run `rollart robots train` first")
    policy = TrainedPolicy(found / "policy")
    if policy.task != run.task:
        raise RollartError(f"the policy in {found} was trained for {policy.task}, not for {run.task}")
    mine = learner_config(run)
    for key in ("policy", "control", "network"):
        if getattr(policy.config, key) != getattr(mine, key):
            raise RollartError(f"the policy in {found} was trained with another `{key}` than the run file has")
    return found


def _check_resumed(run: RobotRunFile, folder: Path) -> None:
    """Episodes that the ledger holds have as many candidates, and versions as many steps. Raises RollartError."""
    before = load(folder / "run.yaml", []).tuning
    for key in ("candidates", "optimizer_steps"):
        if (old := getattr(before, key)) != getattr(run.tuning, key):
            raise RollartError(f"the tuning in {folder} was started with tuning.{key} {old}; resume it with the same")


def _successes(score: RobotScore) -> dict[int, bool]:
    return {episode.seed: episode.success for episode in score.played}


class _Tuning(RobotRun):
    work = "tuning"

    def __init__(self, run: RobotRunFile, folder: Path, ledger: SqliteLedger) -> None:
        super().__init__(run, folder, steps=run.tuning.steps, alpha=run.tuning.alpha)
        self._ledger = ledger

    def _newest(self) -> Path | None:
        """That the ledger knows: a later one may be there if the run was killed before it did."""
        version = self._ledger.checkpoint
        return self._checkpoints / f"{version:06d}" if version else None

    async def _train(self, checkpoint: Path | None) -> RobotScore:
        run, folder = self._run, self._folder
        config, start = learner_config(run), folder / "start"
        tuning = run.tuning.model_dump(mode="json")
        client = await self._start(
            config, folder / "demonstrations.npz", checkpoint, tuning=tuning, start=str(start.absolute())
        )
        if not (folder / "before.json").exists():
            before = await self._evaluate(TrainedPolicy(start), 0, run.evaluation.episodes)
            (folder / "before.json").write_text(json.dumps(_successes(before)))
        await client.export([folder / "policy"])
        try:
            await self._learn(client, ActingPolicy(folder / "policy", run.tuning.optimizer_steps))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        policy = TrainedPolicy(folder / "policy")
        score = await self._evaluate(policy, run.tuning.steps, run.evaluation.episodes, final=True)
        save_score(score, folder)
        return score

    async def _learn(self, client: RobotTrainerClient, acting: ActingPolicy) -> None:
        tuning, log, ledger = self._run.tuning, self._log, self._ledger
        scheduler = Scheduler(
            tasks=[RolloutTask(self._task.name)],
            schedule=Schedule(alpha=tuning.alpha),
            batch_groups=tuning.groups,
            group_size=tuning.group_size,
            steps=tuning.steps,
            runner=RobotRunner(
                environments=self._pool, acting=acting, task=self._task, explore=tuning.explore, sink=log
            ),
            engines=acting,
            ledger=ledger,
            seed=self._run.seed,
            sink=log,
        )
        recovery = ledger.recover()
        scheduler.recover(recovery)
        loop = TrainingLoop(
            plan=LoopPlan(tuning.steps, tuning.checkpoint_every, tuning.evaluate_every, self._run.evaluation.quick),
            version=recovery.version,
            source=scheduler,
            trainer=_ChunkTrainer(client, ledger, acting, tuning.advantage, self._folder / "policy"),
            engines=acting,
            evaluator=_HeldOut(self, acting),
            ledger=ledger,
            sink=log,
            checkpoints=self._checkpoints,
            on_saved=self._saved,
        )
        try:
            await loop.run()
        finally:
            await scheduler.stop()

    def _saved(self, version: int) -> None:
        self._ledger.forget(version)
        self._delete_before(version)

    async def evaluate_quickly(self, policy: TrainedPolicy, version: int, episodes: int) -> Evaluated:
        return evaluated(await self._evaluate(policy, version, episodes), self._task.name, version, final=False)


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """Evaluations while the training goes on."""

    tuning: _Tuning
    acting: ActingPolicy

    async def run(self, version: int, episodes: int, *, label: str = "eval", final: bool = False) -> list[Evaluated]:
        return [await self.tuning.evaluate_quickly(self.acting.policy, version, episodes)]


@dataclass(frozen=True, slots=True)
class _ChunkTrainer:
    """The robot trainer, for the training loop. `folder`: where it publishes the policy."""

    client: RobotTrainerClient
    ledger: SqliteLedger
    acting: ActingPolicy
    advantage: str
    folder: Path

    async def step(self, batch: Batch) -> StepMetrics:
        chunks = chunk_batch(batch, self.ledger, self.advantage, self.acting.policy)
        began = time.monotonic()
        values = await self.client.update(chunks)
        reward = {"reward": fmean(value for group in batch.groups for value in group.rewards.values())}
        return StepMetrics(
            version=batch.step + 1,
            seconds=time.monotonic() - began,
            tokens=len(chunks.chosen),
            values={**values, **reward},
            tasks={batch.groups[0].task: reward},
        )

    async def publish(self) -> Publication:
        await self.client.export([self.folder])
        return Publication(self.acting.version_at(TrainedPolicy(self.folder).step))

    async def save(self, path: Path) -> None:
        await self.client.save(path)

    async def saved(self) -> str:
        """`save` returned when it was."""
        return ""
