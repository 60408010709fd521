"""The single controller: from a run file to a trained model in a run folder."""

import asyncio
import contextlib
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollart.config import RewardConfig, RunFile
from rollart.core.errors import ServiceError
from rollart.core.events import EventSink, RolledBack
from rollart.core.schedule import Schedule
from rollart.core.types import Sampling
from rollart.envs.dataset import row_count
from rollart.fleet.checkpoints import CheckpointEvaluator, Checkpoints
from rollart.fleet.control_engines import RecordedRegistry
from rollart.fleet.control_services import (
    ControlStart,
    TapedFleet,
    TapedLedger,
    recorded,
)
from rollart.fleet.control_tape import Tape
from rollart.fleet.fleet import Fleet, make_launcher
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.fleet.pairs import PairData, PairEvaluator, PairSource, for_pairs, split_pairs
from rollart.fleet.session import OnLog, Session, run_stage
from rollart.fleet.supervision import background, root_cause, supervised
from rollart.fleet.warmup import first_model
from rollart.hardware.host_stats import HostStats
from rollart.models.folder import atomic_folder
from rollart.observe.metrics import Metrics
from rollart.players.pool import SharedRunner, played_tasks
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.evaluation import EpisodeRunner
from rollart.rollout.ledger import Ledger, Recovery
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.training_loop import BatchSource, HeldOut, LoopPlan, TrainingLoop
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner
from rollart.training.client import TrainerLost
from rollart.warmup.pairs import PairFile

_SAMPLE_SECONDS = 0.5
_HOST_TICKS = 10
_MAX_TRAINER_LOSSES = 3


async def train(
    run: RunFile,
    directory: Path,
    *,
    stage: str = "train",
    resume: bool = False,
    on_log: OnLog | None = None,
    metrics: Metrics | None = None,
) -> dict[str, Any]:
    """Train as the run file says, by a stage of `STAGES`, and leave everything in `directory`. `metrics` gets every
    event before the listeners of `on_log` do. Returns the summary."""
    steps = run.training.steps
    return await run_stage(
        STAGES[stage], run, directory, steps=steps, work=stage, resume=resume, on_log=on_log, metrics=metrics
    )


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
            compared=task.reward.of_group,
            numbered=task.dataset is not None,
            group_size=task.group_size or 0,
            plan=None if task.schedule is None else task.schedule.plan(),
            band=None if task.curriculum is None else task.curriculum.rule(),
            rule=None if task.filter is None else task.filter.rule(),
        )
        for task in run.tasks
    ]


def held_out_rows(run: RunFile) -> dict[str, int]:
    """By task, for those that have a dataset."""
    return {task.name: row_count(task.dataset.model_dump(), True) for task in run.tasks if task.dataset is not None}


@dataclass(frozen=True, slots=True)
class Training:
    """One run while its services are up. A lost trainer is restarted at the last checkpoint, with all trajectories that
    were ready by then."""

    run: RunFile
    fleet: Fleet | TapedFleet
    ledger: LedgerWriter | TapedLedger
    log: EventSink
    checkpoints: Checkpoints
    pairs: PairData | None = None
    phases: PhaseChanges = field(default_factory=PhaseChanges)

    async def run_all(self, recovery: Recovery, model: Path) -> None:
        """Evaluate, take all steps, keep the model in `model`, evaluate again."""
        steps, episodes = self.run.training.steps, self.run.evaluation.final_episodes
        evaluator, alone = self._evaluator(), self._alone
        if recovery.version == 0:
            await supervised(
                self.fleet.supervise(trainer=alone), evaluator.run(0, episodes, label="before", final=True)
            )
        await self._until_trained(evaluator, recovery)
        await self.fleet.export(self.checkpoints.path(steps), model)  # even if the last evaluation fails
        await supervised(self.fleet.supervise(trainer=alone), evaluator.run(steps, episodes, label="after", final=True))

    @property
    def _alone(self) -> bool:
        """Whether there is the trainer and nothing else."""
        return self.pairs is not None and self.pairs.scored

    def _evaluator(self) -> HeldOut:
        run, fleet = self.run, self.fleet
        if self.pairs is not None and self.pairs.scored:
            assert isinstance(fleet, Fleet)
            samples = self.pairs.samples(run, fleet.renderer)
            return PairEvaluator(self.pairs.held_out, samples, fleet, self.log, self.checkpoints)
        return CheckpointEvaluator(
            rollout_tasks(run),
            make_runner(run, fleet, self.log, self.phases),
            self.ledger,
            self.log,
            self.checkpoints,
            samples=run.evaluation.samples,
            available=held_out_rows(run),
        )

    async def _until_trained(self, evaluator: HeldOut, recovery: Recovery) -> None:
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
            publication = await self.fleet.restart_trainer(self.checkpoints.path(version) if version else None, version)
        except ServiceError as error:
            raise TrainerLost(str(error)) from error
        if not self._alone:
            await self.fleet.router.engines.load(publication)
        self.log.emit(RolledBack(version=version, reason=reason))

    async def _learn(self, evaluator: HeldOut, recovery: Recovery) -> None:
        run, fleet = self.run, self.fleet
        if self.pairs is not None:
            assert isinstance(fleet, Fleet)  # without rollouts there is little to record
            samples = self.pairs.samples(run, fleet.renderer)
            source = PairSource(run, self.pairs.trained, samples, self.log, recovery.version)
            every = run.evaluation.every or run.training.steps  # only evaluations need new weights
            await supervised(fleet.supervise(), self._loop(source, evaluator, recovery, publish_every=every).run())
            return
        schedule = run.rollout.schedule()
        runner = make_runner(run, fleet, self.log, self.phases, Lockstep() if schedule.lockstep else None)
        scheduler = _scheduler(run, schedule, runner, fleet.router.engines, ledger=self.ledger, log=self.log)
        scheduler.recover(recovery)
        try:
            async with background(_sample(scheduler, fleet, self.log)):
                await supervised(fleet.supervise(), self._loop(scheduler, evaluator, recovery).run())
        finally:
            await scheduler.stop()

    def _loop(
        self, source: BatchSource, evaluator: HeldOut, recovery: Recovery, *, publish_every: int = 1
    ) -> TrainingLoop:
        run = self.run
        return TrainingLoop(
            plan=LoopPlan(
                run.training.steps,
                run.checkpoint.every,
                run.evaluation.every,
                run.evaluation.episodes,
                publish_every=publish_every,
            ),
            version=recovery.version,
            source=source,
            trainer=self.fleet.trainer,
            engines=None if self._alone else self.fleet.router.engines,
            evaluator=evaluator,
            ledger=self.ledger,
            sink=self.log,
            checkpoints=self.checkpoints.folder,
            on_saved=self.checkpoints.commit,
        )


async def _train(session: Session, pairs: PairData | None = None) -> None:
    run, directory, log, version = session.run, session.directory, session.log, session.recovery.version
    checkpoints = Checkpoints(directory / "checkpoints", run.checkpoint.keep, best=run.checkpoint.best)
    checkpoints.start(version)
    launcher = make_launcher(run)
    try:
        model = await first_model(run, directory, log, launcher)
    except BaseException:
        await launcher.close()
        raise
    checkpoint = checkpoints.path(version) if version else None
    with contextlib.ExitStack() as stack:
        tape = stack.enter_context(recorded(session)) if run.ledger.control and pairs is None else None
        registry = EngineRegistry if tape is None else partial(RecordedRegistry, tape)
        async with Fleet(
            run,
            directory,
            log,
            model=model,
            version=version,
            checkpoint=checkpoint,
            registry=registry,
            rollouts=pairs is None or not pairs.scored,
            launcher=launcher,
        ) as fleet:
            writer = stack.enter_context(contextlib.closing(LedgerWriter(session.ledger, log.flush)))
            training = Training(run, fleet, writer, log, checkpoints, pairs)
            async with background(_sample_hosts(fleet, training.phases, log)):
                if tape is None:
                    await training.run_all(session.recovery, directory / "model")
                else:
                    await _recorded(tape, training, fleet, session)


async def _recorded(tape: Tape, training: Training, fleet: Fleet, session: Session) -> None:
    """As `run_all`, with everything that the control plane gets from outside on the tape."""
    begin = ControlStart.of(fleet)
    taped = replace(
        training,
        fleet=TapedFleet(tape, fleet.router, fleet, stop=begin.stop, has=begin.has),
        ledger=TapedLedger(tape, training.ledger),
        log=tape.sink(session.log),
    )
    tape.external("start", begin)
    try:
        await tape.run(lambda: taped.run_all(session.recovery, session.directory / "model"), "stop")
    finally:
        tape.external("end")


def make_runner(
    run: RunFile,
    fleet: Fleet | TapedFleet,
    log: EventSink,
    phases: PhaseChanges,
    lockstep: Lockstep | None = None,
) -> EpisodeRunner:
    here = TrajectoryRunner(
        environments=fleet.environments,
        router=fleet.router,
        renderer=fleet.renderer,
        rewards=fleet.rewards,
        sink=log,
        lockstep=lockstep,
        agents=fleet.agents,
        teachers=fleet.teachers,
        phases=phases,
    )
    return here if fleet.players is None else SharedRunner(fleet.players, here, played_tasks(run))


def _scheduler(
    run: RunFile, schedule: Schedule, runner: EpisodeRunner, engines: EngineRegistry, ledger: Ledger, log: EventSink
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
        engines=engines,
        ledger=ledger,
        sink=log,
        quarantine=run.environments.quarantine.rule(),
    )


async def _fine_tune(session: Session) -> None:
    model = await first_model(session.run, session.directory, session.log)
    with atomic_folder(session.directory / "model") as draft:
        shutil.copytree(model, draft, dirs_exist_ok=True)


async def _prefer(session: Session) -> None:
    """The training loop with pairs in place of rollouts, which only evaluations make."""
    await _train(replace(session, run=for_pairs(session.run)), PairData(PairFile(session.run.preference)))


async def _reward_model(session: Session) -> None:
    """The same with a reward model in place of the policy: nothing is generated, and pairs are held out."""
    run = session.run
    trained, held_out = split_pairs(PairFile(run.preference), run.preference.held_out, run.seed)
    await _train(replace(session, run=for_pairs(run, scored=True)), PairData(trained, held_out, scored=True))


STAGES = {"train": _train, "sft": _fine_tune, "dpo": _prefer, "reward-model": _reward_model}


async def _sample(scheduler: Scheduler, fleet: Fleet | TapedFleet, log: EventSink) -> None:
    while True:
        pools = (fleet.environments, fleet.agents, fleet.players)
        in_use = sum(pool.in_use for pool in pools if pool is not None)
        log.emit(scheduler.sample(in_use, sum(pool.capacity for pool in pools if pool is not None)))
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _sample_hosts(fleet: Fleet, phases: PhaseChanges, log: EventSink) -> None:
    """What changes whether the run trains or evaluates: phases of trajectories, the gateway, this machine."""
    stats, ticks = HostStats(), 0
    while True:
        if fleet.rollouts:
            phases.sample(log, fleet.router.pool_of)
        if ticks % _HOST_TICKS == 0:
            log.emit(stats.sample())
            if fleet.agents is not None:
                log.emit(fleet.agents.sample())
        ticks += 1
        await asyncio.sleep(_SAMPLE_SECONDS)
