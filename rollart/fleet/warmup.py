"""The warmup of a run: supervised steps by the ranks of its trainer, before there are engines.

Invariants: `files` holds what an interrupted warmup goes on from: the tiny model, the examples and the last checkpoint,
each complete or not there. The batches follow from the seed and the step, so a warmup that was interrupted, or whose
trainer was lost, gives the weights of one that was not.
"""

import asyncio
import shutil
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rollart.config import AlgorithmConfig, RunFile, WarmupConfig
from rollart.core.errors import RollartError, ServiceError
from rollart.core.event_log import EventLog
from rollart.core.events import WarmupStep, Warned
from rollart.core.seeds import seed_of
from rollart.fleet.fleet import expect_services, make_launcher, placement_plan, weights_folder
from rollart.fleet.supervision import root_cause, supervised
from rollart.fleet.trainer_supervisor import TrainerSupervisor, trainer_commands
from rollart.launch.launcher import Launcher
from rollart.launch.local import LocalLauncher
from rollart.models.folder import is_model
from rollart.placement.plan import with_plan
from rollart.training.client import TrainerClient, TrainerLost, export_in_child, is_checkpoint
from rollart.warmup.examples import StoredExamples, batches
from rollart.warmup.prepare import Progress, prepare_in_child

MAX_LOSSES = 3


async def first_model(run: RunFile, directory: Path, log: EventLog, launcher: Launcher | None = None) -> Path:
    """The model that RL starts from: the user's folder, or `start`, which is made unless it is there. Meanwhile the
    services that RL needs are spawned by its `launcher`."""
    start, files = directory / "start", directory / "warmup"
    if run.model.warmup is None:
        return await prepare_in_child(run, start, files, log=directory / "logs" / "prepare.log")
    if not is_model(start):
        await warm_up(run, run.model.warmup, directory, log, launcher)
    shutil.rmtree(files, ignore_errors=True)
    return start


async def warm_up(
    run: RunFile, config: WarmupConfig, directory: Path, log: EventLog, launcher: Launcher | None = None
) -> Path:
    """The model after all steps of the warmup, in `start`. What a warmup needs is in `warmup` until then."""
    start, files = directory / "start", directory / "warmup"
    warmup = _Warmup(run, config, directory.absolute(), files.absolute(), log)
    if warmup.newest() < config.steps:
        await warmup.take_steps(launcher)
    if not is_model(start):  # a run that was killed between the last checkpoint and its export
        await export_in_child(warmup.checkpoint(config.steps), start)
    return start


class _Warmup:
    def __init__(self, run: RunFile, config: WarmupConfig, directory: Path, files: Path, log: EventLog) -> None:
        self._run, self._config, self._log = _without_reference(run), config, log
        self._directory, self._files, self._logs = directory, files, directory / "logs"
        self._weights = weights_folder(run, directory)
        self._model: Path
        self._trainer: TrainerSupervisor

    def checkpoint(self, step: int) -> Path:
        return self._files / f"{step:06d}"

    def newest(self) -> int:
        """The step of the last checkpoint; 0 without any."""
        numbers = [int(path.name) for path in self._files.glob("*") if path.name.isdigit() and is_checkpoint(path)]
        return max(numbers, default=0)

    async def take_steps(self, later: Launcher | None) -> None:
        """The trainer is spawned at once, and starts while the examples are still made."""
        model: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        examples = self._files / "examples"
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            await self._place_trainer(stack)
            preparing = group.create_task(
                prepare_in_child(
                    self._run,
                    self._files / "model",
                    examples,
                    on_model=model.set_result,
                    on_progress=self._on_progress,
                    log=self._logs / "prepare.log",
                )
            )
            self._model = (await model).absolute()
            await self._trainer.start()
            await preparing
            if isinstance(later, LocalLauncher):
                await expect_services(self._run, later, self._logs)
            await self._until_done(StoredExamples(examples))

    def _on_progress(self, progress: Progress) -> None:
        if progress.left_out:
            what = f"{progress.left_out} of {progress.done} conversations of the warmup were left out"
            self._log.emit(Warned(message=f"{what}: no answer begins within the longest max_context of the tasks"))

    async def _place_trainer(self, stack: AsyncExitStack) -> None:
        remove = partial(shutil.rmtree, self._weights, ignore_errors=True)
        remove()  # a killed run may have left some
        stack.callback(remove)
        launcher = make_launcher(self._run)
        stack.push_async_callback(launcher.close)
        placed = await placement_plan(self._run, launcher)
        self._run = with_plan(self._run, placed)
        (pool,) = self._run.pools_of("train")
        bindings = [binding for binding in placed.bindings if binding.pool == pool]
        if isinstance(launcher, LocalLauncher):
            for command in trainer_commands(self._run, bindings, {}, self._logs):
                await launcher.expect(command)
        self._trainer = TrainerSupervisor(
            self._run, bindings, launcher=launcher, spec=self._spec, sink=self._log, logs=self._logs
        )
        stack.push_async_callback(self._trainer.stop)

    def _spec(self) -> dict[str, Any]:
        step = self.newest()
        checkpoint = str(self.checkpoint(step)) if step else None
        return {
            "model": str(self._model),
            "weights": str(self._weights),
            "seed": self._run.seed,
            "version": step,
            "checkpoint": checkpoint,
        }

    async def _until_done(self, examples: StoredExamples) -> None:
        """All steps, across restarts of the trainer."""
        losses = 0
        while True:
            first = self.newest()
            try:
                await supervised(self._trainer.watch(), self._steps(self._trainer.client, examples, first))
                return
            except (ServiceError, BaseExceptionGroup) as error:
                lost = root_cause(error)
                if not isinstance(lost, TrainerLost):
                    raise
            losses = losses + 1 if self.newest() == first else 1
            if losses > MAX_LOSSES:
                raise ServiceError(f"the trainer was lost {losses} times after step {first} of the warmup: {lost}")
            message = f"the trainer was lost; the warmup goes on from step {self.newest()}: {lost}"
            self._log.emit(Warned(message=message))
            await self._trainer.restart()

    async def _steps(self, trainer: TrainerClient, examples: StoredExamples, first: int) -> None:
        config, seed = self._config, seed_of(self._run.seed, "warm-up")
        for batch in batches(examples, config, seed, first):
            done = await trainer.imitate(batch)
            self._log.emit(WarmupStep(step=done.version, steps=config.steps, loss=done.values["loss"]))
            for warning in done.warnings:
                self._log.emit(Warned(message=warning))
            if done.version % config.checkpoint_every == 0 or done.version == config.steps:
                await self._save(trainer, done.version)
        await trainer.export(self.checkpoint(config.steps), self._directory / "start")

    async def _save(self, trainer: TrainerClient, step: int) -> None:
        """Replace the last checkpoint. Without that of the last step there is no result."""
        old = self.newest()
        await trainer.save(self.checkpoint(step))
        if problem := await trainer.saved():
            if step == self._config.steps:
                raise RollartError(problem)
            self._log.emit(Warned(message=problem))
        elif old:
            shutil.rmtree(self.checkpoint(old))


def _without_reference(run: RunFile) -> RunFile:
    """The KL is to the policy at the start of RL, which there is not yet; the critic begins as that policy too."""
    algorithm = run.training.algorithm.model_copy(update={"kl": 0.0, "advantage": AlgorithmConfig().advantage})
    training = run.training.model_copy(update={"algorithm": algorithm})
    tasks = [task.model_copy(update={"algorithm": None}) for task in run.tasks]
    return run.model_copy(update={"training": training, "tasks": tasks})
