"""Train the batches of a run again, from its ledger, and compare the weights of every version with those published.

Invariants: the batches are those of the history that the checkpoints kept, in the order in which they were trained, and
each is checked against its checksums before it is trained. The trainer is the service of the run, in the layout and
with the settings that it had at that step; where they changed, another one goes on from a checkpoint. Nothing is
written to the run folder.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollart.config import AlgorithmConfig, RunFile, TrainingConfig, loading
from rollart.core.errors import RollartError
from rollart.core.event_log import read_events
from rollart.core.events import NULL_SINK, BatchTaken, Published, RolledBack, RunStarted, ServiceStarted, StepDone
from rollart.core.run_folder import events_of
from rollart.core.types import Batch, SampleGroup
from rollart.fleet.checkpoints import Checkpoints
from rollart.fleet.fleet import make_launcher, placement_plan
from rollart.fleet.trainer_supervisor import TrainerSupervisor
from rollart.models.folder import is_model
from rollart.rollout.groups import Group
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.samples import sample_group, trained_members
from rollart.training.client import TrainerClient
from rollart.weights.store import shared_folder

DIGITS = 8  # of a tensor's digest
# Of a trainer, in the details of its start; `tasks` are the algorithms of tasks that have one of their own.
_SETTINGS = ("ranks", "seed", "engine_dtype", "config", "tasks")


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step of the history that the checkpoints kept: its batch, the `details` of the trainer that took it, and the
    digests of the version that it gave, if that was published."""

    taken: BatchTaken
    details: Mapping[str, str]
    digests: str = ""

    @property
    def trajectories(self) -> list[str]:
        return [
            f"{id}.{member}"
            for id, members in zip(self.taken.ids, self.taken.members, strict=True)
            for member in members
        ]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first version whose weights are not those that were published. `tensor` is the first of `tensors`."""

    version: int
    tensor: str
    tensors: int

    @property
    def step(self) -> int:
        return self.version - 1


@dataclass(slots=True)
class ReplayResult:
    """`start` is the version that the replay began with. `unknown` are versions without a digest in the event log: a
    run that was stopped saves its last step without publishing it."""

    start: int
    end: int = 0
    compared: int = 0
    unknown: list[int] = field(default_factory=list)
    difference: Difference | None = None

    @property
    def identical(self) -> bool:
        return self.difference is None and self.compared > 0


async def replay(
    folder: Path,
    *,
    first: int | None = None,
    last: int | None = None,
    anyway: bool = False,
    on_version: Callable[[int, bool | None], None] = lambda version, same: None,
) -> ReplayResult:
    """From version `first`, or the newest checkpoint before it, to `last`; by default as much as there is data for.
    `anyway`: on a machine that may give other weights, too. `on_version` gets each version and whether it is the same,
    None if that is not known. Ends at the first difference. Raises RollartError."""
    steps, run = history(folder), loading.load(folder / "run.yaml")
    end = len(steps) if last is None else last
    if not steps or end > len(steps) or end < 1:
        raise RollartError(f"{folder} has trained {len(steps)} steps, so there is no version {end} to replay")
    with (
        closing(SqliteLedger.open_readonly(folder / "ledger.sqlite")) as ledger,
        TemporaryDirectory(prefix="rollart-replay-") as scratch,
    ):
        models = _models(folder, steps, ledger.checkpoint)
        start = _start(steps, models, ledger, first, end)
        session = _Session(run, ledger, Path(scratch), models[0], anyway)
        result = ReplayResult(start, start)
        try:
            await session.open(steps[start].details, start, models.get(start) if start else None)
            for step in range(start, end):
                same = await session.take(step, steps[step], result)
                on_version(step + 1, same)
                if same is False:
                    break
        finally:
            await session.close()
    return result


def history(folder: Path) -> list[TrainedStep]:
    """By step, what the checkpoints kept: what a kill or a rollback discarded is not in it."""
    taken: dict[int, BatchTaken] = {}
    details: dict[int, dict[str, str]] = {}
    digests: dict[int, str] = {}
    trained, current = 0, dict[str, str]()
    kinds = (RunStarted, RolledBack, ServiceStarted, BatchTaken, StepDone, Published)
    for event in read_events(events_of(folder), *kinds):
        match event:
            case RunStarted() | RolledBack():
                trained = event.version
                digests = {version: text for version, text in digests.items() if version <= trained}
            case ServiceStarted(role="train") if event.details:
                current = event.details
            case BatchTaken():
                taken[event.step], details[event.step] = event, current
            case StepDone():
                trained = event.version
            case Published():
                digests[event.version] = event.digests
    if any(step not in taken or not taken[step].members or not details[step] for step in range(trained)):
        raise RollartError(f"{folder} was made by an older version of rollart, which did not log what a replay needs")
    return [TrainedStep(taken[step], details[step], digests.get(step + 1, "")) for step in range(trained)]


def _models(folder: Path, steps: list[TrainedStep], committed: int) -> dict[int, Path]:
    """By version, what a trainer can start from: the first model, and the checkpoints of this history."""
    model = Path(steps[0].details["model"])
    checkpoints = Checkpoints(folder / "checkpoints")
    found = {version: checkpoints.path(version) for version in checkpoints.versions() if version <= committed}
    return {0: model if is_model(model) else folder / "start"} | found


def _start(
    steps: list[TrainedStep], models: Mapping[int, Path], ledger: SqliteLedger, first: int | None, end: int
) -> int:
    """The version to begin with. Raises RollartError if what is needed from there on is gone."""
    if not is_model(models[0]):
        raise RollartError(f"the model that the run started from is gone: {models[0]} is not a model folder")
    oldest = end  # that all steps from there on are in the ledger
    while oldest and ledger.has_all(steps[oldest - 1].trajectories):
        oldest -= 1
    complete = [version for version in sorted(models) if oldest <= version < end]
    keep = "keep them with `ledger: {keep: all}` in the run file, and more checkpoints with `checkpoint: {keep: N}`"
    if first is None:
        if not complete:
            raise RollartError(
                f"the ledger has the trajectories of steps {oldest} to {end - 1} only, and there is no checkpoint of "
                f"one of these versions to start from; {keep}"
            )
        return complete[0]
    start = max(version for version in models if version <= first)
    if start >= end:
        raise RollartError(f"version {first} is not before version {end}, where the replay would end")
    if start < oldest:
        instead = f"start later with `--from {complete[0]}`, or " if complete else ""
        raise RollartError(
            f"a replay from version {first} starts at version {start}, and the trajectories of step {oldest - 1} are "
            f"no longer in the ledger; {instead}{keep}"
        )
    return start


def batch_of(step: TrainedStep, ledger: SqliteLedger) -> Batch:
    """The batch as it was trained. Raises RollartError for a trajectory that has changed since."""
    number, groups = step.taken.step, list[SampleGroup]()
    for id, members in zip(step.taken.ids, step.taken.members, strict=True):
        done = [ledger.trajectory(f"{id}.{member}") for member in members]
        group = Group(id, done[0].task, 0, done[0].seed, len(done), 0, done=done)
        samples = sample_group(group)
        for member, checksum in trained_members(group, samples).items():
            if checksum != members[member]:
                raise RollartError(
                    f"trajectory {id}.{member} in the ledger is not the one that step {number} trained: "
                    "its checksum differs"
                )
        groups.append(samples)
    return Batch(number, tuple(groups))


class _Session:
    """One trainer after another, each with the settings of the steps that it takes."""

    def __init__(self, run: RunFile, ledger: SqliteLedger, scratch: Path, model: Path, anyway: bool) -> None:
        self._run, self._ledger, self._scratch, self._model, self._anyway = run, ledger, scratch, model, anyway
        self._details: Mapping[str, str] = {}
        self._stack = AsyncExitStack()
        self._trainer: TrainerClient

    async def take(self, number: int, step: TrainedStep, result: ReplayResult) -> bool | None:
        """Train the batch of a step; whether the weights are those that were published, None if that is not known."""
        if any(step.details.get(name) != self._details.get(name) for name in _SETTINGS):
            await self._change(step.details, number)
        await self._trainer.step(batch_of(step, self._ledger))
        digests = (await self._trainer.publish()).digests
        result.end = number + 1
        if not step.digests:
            result.unknown.append(result.end)
            return None
        result.compared += 1
        result.difference = compare(result.end, digests, step.digests)
        return result.difference is None

    async def _change(self, details: Mapping[str, str], version: int) -> None:
        checkpoint = self._scratch / f"{version:06d}"
        await self._trainer.save(checkpoint)
        if fault := await self._trainer.saved():
            raise RollartError(fault)
        await self.close()
        await self.open(details, version, checkpoint)
        shutil.rmtree(checkpoint)

    async def open(self, details: Mapping[str, str], version: int, checkpoint: Path | None) -> None:
        """Start a trainer as `details` say. Raises RollartError if it would compute something else."""
        self._details = details
        run = _with_settings(self._run, details)
        launcher = make_launcher(run)
        self._stack.push_async_callback(launcher.close)
        weights = shared_folder("replay")
        self._stack.callback(shutil.rmtree, weights, ignore_errors=True)
        placed = await placement_plan(run, launcher)
        roles = {name: pool.role for name, pool in run.all_pools().items()}
        bindings = [binding for binding in placed.bindings if roles[binding.pool] == "train"]
        ranks = int(details["ranks"])
        if len(bindings) < ranks:
            raise RollartError(f"the run trained with {ranks} ranks, and there is room for {len(bindings)} here")
        spec = {
            "model": str(self._model.absolute()),
            "weights": str(weights),
            "seed": run.seed,
            "version": version,
            "checkpoint": str(checkpoint.absolute()) if checkpoint else None,
        }
        supervisor = TrainerSupervisor(
            run, bindings[:ranks], launcher=launcher, spec=lambda: spec, sink=NULL_SINK, logs=self._scratch
        )
        self._stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        self._trainer = supervisor.client
        if not self._anyway:
            check_same(details, await self._trainer.describe())

    async def close(self) -> None:
        await self._stack.aclose()


def _with_settings(run: RunFile, details: Mapping[str, str]) -> RunFile:
    """The run file as it was when the trainer of `details` started."""
    training = TrainingConfig.model_validate_json(details["config"])
    engine = run.engine.model_copy(update={"dtype": details["engine_dtype"]})
    tasks = run.tasks
    if "tasks" in details:  # not in the log of an older rollart
        own = json.loads(details["tasks"])
        tasks = [task.model_copy(update={"algorithm": _algorithm(own.get(task.name))}) for task in tasks]
    changed = {"training": training, "engine": engine, "seed": int(details["seed"]), "tasks": tasks}
    return run.model_copy(update=changed)


def _algorithm(given: Mapping[str, Any] | None) -> AlgorithmConfig | None:
    return None if given is None else AlgorithmConfig.model_validate(given)


def check_same(then: Mapping[str, str], now: Mapping[str, str]) -> None:
    others = [
        f"{name} {then.get(name) or 'unset'} (here {here or 'unset'})"
        for name, here in now.items()
        if then.get(name) != here
    ]
    if others:
        raise RollartError(
            f"the run trained with {', '.join(others)}, so its weights cannot be expected to come out the same; "
            "replay it where that is as it was, or try with --anyway"
        )


def compare(version: int, got: Mapping[str, str], logged: str) -> Difference | None:
    want = [logged[at : at + DIGITS] for at in range(0, len(logged), DIGITS)]
    if len(want) != len(got):
        return Difference(version, f"the number of tensors: {len(got)}, and {len(want)} were published", len(got))
    others = [name for (name, digest), other in zip(got.items(), want, strict=True) if digest != other]
    return Difference(version, others[0], len(others)) if others else None
