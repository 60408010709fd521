"""A run of RL that tunes an imitated policy: episodes with exploration, updates, checkpoints, one event log.

The run folder is that of an imitation, and holds besides

    start/         the policy that it started from
    before.json    its successes on the held-out episodes, by seed

A checkpoint has everything that the next update depends on but the episodes under way: a run that was interrupted drops
those, and plays others.
"""

import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rollart.config.robots import RobotRunFile
from rollart.core import run_folder
from rollart.core.errors import ConfigError, RollartError
from rollart.core.event_log import read_events
from rollart.core.events import GroupStarted, Published, StepDone
from rollart.robots.episodes import RobotScore
from rollart.robots.exploration import GroupPlayer, chunk_batch
from rollart.robots.learner import TrainedPolicy
from rollart.robots.run import OnLog, RobotRun, load, save_score
from rollart.robots.service import RobotTrainerClient
from rollart.robots.tuning_learner import check_loss, learner_config
from rollart.training.advantages import ADVANTAGES, of_whole_trajectories

_NORMAL_95 = 1.96


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
    tuning = _Tuning(run, folder, steps=run.tuning.steps, alpha=run.tuning.alpha)
    score = await tuning.run(resume=start is None, on_log=on_log)
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


def _successes(score: RobotScore) -> dict[int, bool]:
    return {episode.seed: episode.success for episode in score.played}


class _Tuning(RobotRun):
    work = "tuning"

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
        await self._updates(client, int(checkpoint.name) if checkpoint else 0)
        await self._evaluated()
        policy = TrainedPolicy(folder / "policy")
        score = await self._evaluate(policy, run.tuning.steps, run.evaluation.episodes, final=True)
        save_score(score, folder)
        return score

    async def _updates(self, client: RobotTrainerClient, version: int) -> None:
        run, tuning, folder = self._run, self._run.tuning, self._folder
        await client.export([folder / "policy"])
        earlier = [int(event.group[1:]) for event in read_events(folder / "events", GroupStarted)]
        player = GroupPlayer(
            TrainedPolicy(folder / "policy"), self._pool, self._task, tuning,
            seed=run.seed,
            parallel=run.environments.processes,
            version=version,
            number=max(earlier, default=-1) + 1,
            sink=self._log,
        )  # fmt: skip
        self._stack.push_async_callback(player.close)
        while player.version < tuning.steps:
            policy = await self._update(client, player)
            if player.version % tuning.checkpoint_every == 0 or player.version == tuning.steps:
                await self._checkpoint(client, player.version)
            every = tuning.evaluate_every
            if every and player.version % every == 0 and player.version < tuning.steps:
                await self._evaluate_beside(policy, player.version)

    async def _update(self, client: RobotTrainerClient, player: GroupPlayer) -> TrainedPolicy:
        """One version, while episodes go on."""
        groups = await player.take()
        batch = chunk_batch(groups, self._run.tuning.advantage, player.policy)
        began = time.monotonic()
        values = await client.update(batch)
        trained = time.monotonic()
        await client.export([self._folder / "policy"])
        policy = TrainedPolicy(self._folder / "policy")
        player.advance(policy)
        rewards = [reward for group in groups for reward in group.rewards]
        self._log.emit(
            StepDone(
                version=player.version,
                seconds=trained - began,
                tokens=len(batch.chosen),
                values={**values, "reward": fmean(rewards)},
                tasks={self._task.name: {"reward": fmean(rewards)}},
            )
        )
        self._log.emit(Published(version=player.version, seconds=time.monotonic() - trained))
        return policy
