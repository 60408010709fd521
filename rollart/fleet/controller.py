"""The single controller: from a run file to a trained model in a run folder."""

import asyncio
import contextlib
import fcntl
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.config import RewardConfig, RunFile, loading
from rollart.core import gc_tuning
from rollart.core.errors import ConfigError, RollartError, ServiceError
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import Evaluated, RunEnded, RunStarted, StepDone
from rollart.core.schedule import Schedule
from rollart.core.types import Sampling
from rollart.fleet import provenance
from rollart.fleet.checkpoints import CheckpointEvaluator, Checkpoints
from rollart.fleet.endpoint import ModelEndpoint, endpoint_runner, without_limits
from rollart.fleet.fleet import Fleet
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.fleet.supervision import background, root_cause, supervised, terminable
from rollart.fleet.warmup import warm_up
from rollart.hardware.host_stats import HostStats
from rollart.models.folder import atomic_folder, is_model
from rollart.observe import summary
from rollart.observe.metrics import Metrics
from rollart.rollout.evaluation import Evaluator
from rollart.rollout.ledger import Recovery, SqliteLedger
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.training_loop import LoopPlan, TrainingLoop
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner
from rollart.training.client import TrainerLost, export_in_child, model_folder
from rollart.warmup.prepare import prepare_in_child

OnLog = Callable[[EventLog], None]
_SAMPLE_SECONDS = 0.5
_HOST_TICKS = 10
_MAX_TRAINER_LOSSES = 3


async def train(
    run: RunFile,
    directory: Path,
    *,
    resume: bool = False,
    on_log: OnLog | None = None,
    rl: bool = True,
    metrics: Metrics | None = None,
) -> dict[str, Any]:
    """Train as the run file says and leave everything in `directory`. Not `rl`: only the warmup. `metrics` gets every
    event before the listeners of `on_log` do. Returns the summary."""
    metrics = metrics or Metrics()
    gc_tuning.collect_rarely()
    if resume:
        _check_same_run(run, directory)
    directory.mkdir(parents=True, exist_ok=True)
    with _exclusive(directory), contextlib.closing(_ledger(run, directory)) as ledger:
        recovery = ledger.recover()
        if recovery.version > run.training.steps:
            raise RollartError(
                f"{directory} is at version {recovery.version} already, beyond training.steps {run.training.steps}"
            )
        (directory / "run.yaml").write_text(loading.dump(run))
        with _event_log(directory, on_log, metrics) as log:
            trained = [recovery.version]
            log.subscribe(lambda event: trained.append(event.version) if isinstance(event, StepDone) else None)
            log.emit(_started(run, recovery, resume))
            try:
                with terminable():
                    await (_train(run, directory, ledger, recovery, log) if rl else _fine_tune(run, directory, log))
            except BaseException as error:
                reason = "interrupted" if isinstance(error, asyncio.CancelledError) else str(root_cause(error))
                log.emit(RunEnded(version=trained[-1], reason=reason))
                log.close()
                summary.write(directory, metrics.snapshot())
                raise root_cause(error) from error
            log.emit(RunEnded(version=trained[-1], reason="finished"))
    return summary.write(directory, metrics.snapshot())


async def evaluate(run: RunFile, model: Path, *, directory: Path, on_log: OnLog | None = None) -> dict[str, Any]:
    """Run the held-out episodes of every task with the policy in `model`."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        contextlib.closing(_ledger(run, directory)) as records,
        _event_log(directory, on_log) as log,
        contextlib.closing(LedgerWriter(records, log.flush)) as ledger,
        terminable(),
    ):
        try:
            async with (
                model_folder(model) as folder,
                Fleet(run, directory, log, model=folder, trainer=False) as fleet,
            ):
                runner = _runner(run, fleet, log, PhaseChanges())
                evaluator = Evaluator(rollout_tasks(run), runner, ledger, log, samples=run.evaluation.samples)
                results = await supervised(
                    fleet.supervise(), evaluator.run(0, run.evaluation.final_episodes, final=True)
                )
        except BaseException as error:
            raise root_cause(error) from error
    return {"model": str(model), "tasks": {result.task: _result(result) for result in results}}


async def evaluate_endpoint(
    run: RunFile, endpoint: ModelEndpoint, *, directory: Path, on_log: OnLog | None = None
) -> dict[str, Any]:
    """Run the held-out episodes of every task with a model that someone else serves."""
    directory.mkdir(parents=True, exist_ok=True)
    ledger = SqliteLedger.open(directory / "ledger.sqlite")
    with contextlib.closing(ledger), _event_log(directory, on_log) as log, terminable():
        async with endpoint_runner(run, endpoint, directory / "logs", log) as runner:
            tasks = without_limits(rollout_tasks(run))
            evaluator = Evaluator(tasks, runner, ledger, log, samples=run.evaluation.samples)
            results = await evaluator.run(0, run.evaluation.final_episodes, final=True)
    return {"model": endpoint.model, "tasks": {result.task: _result(result) for result in results}}


def rollout_tasks(run: RunFile) -> list[RolloutTask]:
    return [
        RolloutTask(
            name=task.name,
            weight=task.weight,
            max_turns=task.max_turns,
            max_context=task.max_context,
            sampling=Sampling(
                temperature=task.sampling.temperature,
                top_p=task.sampling.top_p,
                top_k=task.sampling.top_k,
                max_tokens=task.sampling.max_tokens,
            ),
            agent=task.agent is not None,
            deadline=(task.agent and task.agent.deadline) or run.rollout.trajectory_deadline,
            reward="" if task.reward.function == RewardConfig().function else task.reward.function,
            numbered=task.dataset is not None,
        )
        for task in run.tasks
    ]


@dataclass(frozen=True, slots=True)
class _Training:
    """One run while its services are up. A lost trainer is restarted at the last checkpoint, with all trajectories that
    were ready by then."""

    run: RunFile
    fleet: Fleet
    ledger: LedgerWriter
    log: EventLog
    checkpoints: Checkpoints
    phases: PhaseChanges = field(default_factory=PhaseChanges)

    async def run_all(self, recovery: Recovery, model: Path) -> None:
        """Evaluate, take all steps, keep the model in `model`, evaluate again."""
        steps, episodes = self.run.training.steps, self.run.evaluation.final_episodes
        async with background(_sample_hosts(self.fleet, self.phases, self.log)):
            await self._run_all(recovery, model, steps, episodes)

    async def _run_all(self, recovery: Recovery, model: Path, steps: int, episodes: int) -> None:
        runner = _runner(self.run, self.fleet, self.log, self.phases)
        evaluator = CheckpointEvaluator(
            rollout_tasks(self.run),
            runner,
            self.ledger,
            self.log,
            self.checkpoints,
            samples=self.run.evaluation.samples,
        )
        if recovery.version == 0:
            await supervised(
                self.fleet.supervise(trainer=False), evaluator.run(0, episodes, label="before", final=True)
            )
        await self._until_trained(evaluator, recovery)
        await export_in_child(self.checkpoints.path(steps), model)  # even if the last evaluation fails
        await supervised(self.fleet.supervise(trainer=False), evaluator.run(steps, episodes, label="after", final=True))

    async def _until_trained(self, evaluator: Evaluator, recovery: Recovery) -> None:
        """All steps, across restarts of the trainer."""
        losses, lost = 0, None
        while True:
            try:
                if lost is not None:
                    await self._restart_trainer(recovery.version, str(lost))
                return await self._learn(evaluator, recovery)
            except (ServiceError, BaseExceptionGroup) as error:
                lost = root_cause(error)
                if not isinstance(lost, TrainerLost):
                    raise
            before, recovery = recovery, self.ledger.recover()
            losses = losses + 1 if recovery.version == before.version else 1
            if losses > _MAX_TRAINER_LOSSES:
                again = "`rollart train ... --resume` goes on from the last checkpoint"
                raise ServiceError(
                    f"the trainer was lost {losses} times at version {recovery.version}; {again}: {lost}"
                )

    async def _restart_trainer(self, version: int, reason: str) -> None:
        """A trainer that is lost again during its restart is one more loss."""
        try:
            await self.fleet.restart_trainer(self.checkpoints.path(version) if version else None, version, reason)
        except ServiceError as error:
            raise TrainerLost(str(error)) from error

    async def _learn(self, evaluator: Evaluator, recovery: Recovery) -> None:
        run, fleet = self.run, self.fleet
        schedule = run.rollout.schedule()
        runner = _runner(run, fleet, self.log, self.phases, Lockstep() if schedule.lockstep else None)
        scheduler = _scheduler(run, schedule, runner, self.ledger, self.log)
        scheduler.recover(recovery)
        loop = TrainingLoop(
            plan=LoopPlan(run.training.steps, run.checkpoint.every, run.evaluation.every, run.evaluation.episodes),
            version=recovery.version,
            scheduler=scheduler,
            trainer=fleet.trainer,
            router=fleet.router,
            evaluator=evaluator,
            ledger=self.ledger,
            sink=self.log,
            checkpoints=self.checkpoints.folder,
            on_saved=self.checkpoints.commit,
        )
        try:
            async with background(_sample(scheduler, fleet, self.log)):
                await supervised(fleet.supervise(), loop.run())
        finally:
            await scheduler.stop()


async def _train(run: RunFile, directory: Path, ledger: SqliteLedger, recovery: Recovery, log: EventLog) -> None:
    version = recovery.version
    checkpoints = Checkpoints(directory / "checkpoints", run.checkpoint.keep, best=run.checkpoint.best)
    checkpoints.start(version)
    model = await _first_model(run, directory, log)
    checkpoint = checkpoints.path(version) if version else None
    async with Fleet(run, directory, log, model=model, version=version, checkpoint=checkpoint) as fleet:
        with contextlib.closing(LedgerWriter(ledger, log.flush)) as writer:
            await _Training(run, fleet, writer, log, checkpoints).run_all(recovery, directory / "model")


def _ledger(run: RunFile, directory: Path) -> SqliteLedger:
    keep = run.ledger.keep
    return SqliteLedger.open(directory / "ledger.sqlite", None if keep == "all" else keep)


def _runner(
    run: RunFile, fleet: Fleet, log: EventLog, phases: PhaseChanges, lockstep: Lockstep | None = None
) -> TrajectoryRunner:
    return TrajectoryRunner(
        environments=fleet.environments,
        router=fleet.router,
        renderer=fleet.renderer,
        rewards=fleet.rewards,
        sink=log,
        lockstep=lockstep,
        agents=fleet.agents,
        phases=phases,
    )


def _scheduler(
    run: RunFile, schedule: Schedule, runner: TrajectoryRunner, ledger: LedgerWriter, log: EventLog
) -> Scheduler:
    return Scheduler(
        tasks=[task for task in rollout_tasks(run) if task.weight],
        schedule=schedule,
        batch_groups=run.training.batch_groups,
        group_size=run.training.group_size,
        steps=run.training.steps,
        retries=run.rollout.retries,
        seed=run.seed,
        runner=runner,
        ledger=ledger,
        sink=log,
        quarantine=run.environments.quarantine.rule(),
    )


def _started(run: RunFile, recovery: Recovery, resume: bool) -> RunStarted:
    return RunStarted(
        name=run.name,
        preset=run.rollout.preset,
        alpha=run.rollout.schedule().alpha,
        seed=run.seed,
        steps=run.training.steps,
        tasks=[task.name for task in run.tasks],
        version=recovery.version,
        resumed=resume,
        wall=time.time(),
        emulated=[
            f"{name}: {pool.devices[0]} (1/{pool.emulate:g})" for name, pool in run.pools.items() if pool.emulate
        ],
        model=str(run.model.path or "tiny"),
        packages=provenance.packages(),
        digest=provenance.digest(loading.dump(run)),
        commit=provenance.commit(),
        price=provenance.price(run),
    )


def _result(result: Evaluated) -> dict[str, float | None]:
    return {
        "success": result.success,
        "reward": result.reward,
        "episodes": result.episodes,
        "failed": result.failed,
        "samples": result.samples,
        "passed": result.passed,
    }


async def _first_model(run: RunFile, directory: Path, log: EventLog) -> Path:
    """The model that RL starts from: the user's folder, or `start`, which is made unless it is there."""
    start, files = directory / "start", directory / "warmup"
    if run.model.warmup is None:
        return await prepare_in_child(run, start, files, log=directory / "logs" / "prepare.log")
    if not is_model(start):
        await warm_up(run, run.model.warmup, directory, log)
    shutil.rmtree(files, ignore_errors=True)
    return start


async def _fine_tune(run: RunFile, directory: Path, log: EventLog) -> None:
    if run.model.warmup is None:
        raise ConfigError("the run file has no model.warmup, so there is nothing to learn without RL")
    model = await _first_model(run, directory, log)
    with atomic_folder(directory / "model") as draft:
        shutil.copytree(model, draft, dirs_exist_ok=True)


def _check_same_run(run: RunFile, directory: Path) -> None:
    """A run resumes with the model that it started with; everything else may change."""
    stored = directory / "run.yaml"
    if not stored.exists():
        raise RollartError(f"{directory} has no run to resume")
    if loading.load(stored).model != run.model:
        raise RollartError(
            f"`model` differs from that of the run in {directory}; resume with the same model, or use another directory"
        )


async def _sample(scheduler: Scheduler, fleet: Fleet, log: EventLog) -> None:
    while True:
        agents = fleet.agents
        in_use = fleet.environments.in_use + (agents.in_use if agents else 0)
        log.emit(scheduler.sample(in_use, fleet.environments.capacity + (agents.capacity if agents else 0)))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _sample_hosts(fleet: Fleet, phases: PhaseChanges, log: EventLog) -> None:
    """What changes whether the run trains or evaluates: phases of trajectories, the gateway, this machine."""
    stats, ticks = HostStats(), 0
    while True:
        phases.sample(log)
        if ticks % _HOST_TICKS == 0:
            log.emit(stats.sample())
            if fleet.agents is not None:
                log.emit(fleet.agents.sample())
        ticks += 1
        await asyncio.sleep(_SAMPLE_SECONDS)


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RollartError(f"another process is already training in {directory}") from None
        yield


@contextlib.contextmanager
def _event_log(directory: Path, on_log: OnLog | None, metrics: Metrics | None = None) -> Iterator[EventLog]:
    """`metrics` gets the events of a run that resumes, and those to come."""
    log = EventLog(directory / "events", time.monotonic)
    try:
        if metrics is not None:
            for event in read_events(directory / "events"):
                metrics.fold(event)
            log.subscribe(metrics.fold)
        if on_log is not None:
            on_log(log)
        yield log
    finally:
        log.close()
