"""A run of imitation: demonstrations, a trainer process, checkpoints, evaluations while it trains, one event log.

The run folder holds

    run.yaml              the run file with all defaults
    demonstrations.npz    what is imitated
    events/               the event log, which every view reads
    checkpoints/001000    the trainer's state; the newest is kept
    policy/               the trained policy, by the moving average of its weights
    score.json            the last evaluation

A run that was interrupted goes on from its newest checkpoint with the same batches and noise, so it ends as if it had
not been.
"""

from pathlib import Path

from rollart.config.robots import RobotRunFile
from rollart.core.errors import ConfigError
from rollart.core.events import WarmupStep
from rollart.robots import demonstrations
from rollart.robots.episodes import RobotScore
from rollart.robots.learner import LearnerConfig, TrainedPolicy
from rollart.robots.record import record
from rollart.robots.run import OnLog, RobotRun, save_score
from rollart.robots.service import RobotTrainerClient
from rollart.robots.suites import robot_task

REPORT_EVERY = 50  # steps between two progress events


def check_demonstrations(run: RobotRunFile) -> None:
    """Before there is a run folder. Raises DemonstrationError if the files cannot be used, or ConfigError if there are
    none and the task has no expert."""
    wanted = run.demonstrations
    if wanted.path is not None:
        demonstrations.load_for(run.task, wanted.path, wanted.episodes, run.control.cloud)
    elif robot_task(run.task).player is None:
        raise ConfigError(f"{run.task} has no scripted expert; name recorded files with `demonstrations.path`")


async def train(run: RobotRunFile, folder: Path, *, resume: bool, on_log: OnLog) -> RobotScore:
    """Returns the final evaluation. Raises RollartError."""
    return await _Imitation(run, folder, steps=run.training.steps).run(resume=resume, on_log=on_log)


class _Imitation(RobotRun):
    work = "imitation"

    async def _train(self, checkpoint: Path | None) -> RobotScore:
        run, policy = self._run, self._folder / "policy"
        data = await self._demonstrations()
        config = LearnerConfig(policy=run.policy, control=run.control, network=run.network, training=run.training)
        client = await self._start(config, data, checkpoint)
        await self._steps(client, int(checkpoint.name) if checkpoint else 0)
        await client.export([policy])
        await self._evaluated()
        score = await self._evaluate(TrainedPolicy(policy), run.training.steps, run.evaluation.episodes, final=True)
        save_score(score, self._folder)
        return score

    async def _demonstrations(self) -> Path:
        """The run's own copy, so that a resume sees the same."""
        run, copy = self._run, self._folder / "demonstrations.npz"
        if not copy.exists():
            wanted = run.demonstrations
            if wanted.path is not None:
                found = demonstrations.load_for(run.task, wanted.path, wanted.episodes, run.control.cloud)
            else:
                recorded = await record(
                    run.task,
                    wanted.episodes,
                    run.seed,
                    config=run.environments,
                    deadline=wanted.deadline,
                    points=run.control.cloud,
                )
                found = list(recorded.demonstrations)
            demonstrations.save(copy, found)
        return copy

    async def _steps(self, client: RobotTrainerClient, step: int) -> None:
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
                await client.export([self._folder / "policy"])
                await self._evaluate_beside(TrainedPolicy(self._folder / "policy"), step)
