"""The training loop: take a batch, train, publish, and go on while the engines fetch the new version.

Invariants: the trainer does one thing at a time; every engine swaps to the newest version as soon as it can, and none
waits for the slowest; a checkpoint is committed to the ledger only after it is complete, and one at a time; writing
checkpoints, swaps and evaluations run concurrently with the loop. A failure of swaps or evaluations ends it, as that of
the last checkpoint does; without any other checkpoint it goes on, with a warning. However the loop ends, what was
trained since the last checkpoint is saved if the trainer can do that within `GRACE_S`, the step under way included.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollart.core.errors import DiskFull, RollartError
from rollart.core.events import Checkpointed, Evaluated, EventSink, Published, StepDone, Warned, WorkStarted
from rollart.core.protocols import PolicyServers, Trainer
from rollart.core.types import Batch, Publication, StepMetrics
from rollart.rollout.ledger import Ledger

GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Intervals in optimizer steps. `evaluate_every` 0: only before and after. The last version is always published."""

    steps: int
    checkpoint_every: int
    evaluate_every: int
    episodes: int
    publish_every: int = 1


class BatchSource(Protocol):
    """Where batches come from: the scheduler, or data that is there already."""

    async def take_batch(self) -> Batch: ...

    def finish_step(self) -> None: ...

    async def prepare_swap(self, version: int) -> None: ...


class HeldOut(Protocol):
    """What is never trained, to measure a version with."""

    async def run(
        self, version: int, episodes: int, *, label: str = "eval", final: bool = False
    ) -> list[Evaluated]: ...


def published(publication: Publication, seconds: float) -> Published:
    digests = "".join(publication.digests.values())
    return Published(version=publication.version, seconds=seconds, bytes=publication.bytes, digests=digests)


class TrainingLoop:
    """Without `engines` nothing is published, and the evaluator asks the trainer."""

    def __init__(
        self,
        *,
        plan: LoopPlan,
        version: int,
        source: BatchSource,
        trainer: Trainer,
        engines: PolicyServers | None,
        evaluator: HeldOut,
        ledger: Ledger,
        sink: EventSink,
        checkpoints: Path,
        on_saved: Callable[[int], None],
    ) -> None:
        self.version = version
        self._plan, self._source, self._trainer, self._engines = plan, source, trainer, engines
        self._evaluator, self._ledger, self._sink = evaluator, ledger, sink
        self._checkpoints, self._on_saved = checkpoints, on_saved
        self._publication: Publication | None = None  # the newest
        self._published = asyncio.Event()
        self._saving: asyncio.Task[None] | None = None
        self._evaluation: asyncio.Task[object] | None = None
        self._evaluated = self._committed = self._copied = version
        self._stepping: asyncio.Future[StepMetrics] | None = None

    async def run(self) -> None:
        """Until the last step is trained, loaded by the engines and saved."""
        try:
            await self._run()
        except BaseException:
            await self._save_progress()
            raise

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            swapping = None if self._engines is None else group.create_task(self._swap(group, self._engines))
            while self.version < self._plan.steps:
                batch = await self._source.take_batch()
                await self._train(batch)
                if self._engines is None:
                    self._evaluate_if_due(group, self.version)
                if self.version % self._plan.checkpoint_every == 0 or self.version == self._plan.steps:
                    await self._save(group)
            if swapping is not None:
                await swapping

    async def _train(self, batch: Batch) -> None:
        clock = asyncio.get_running_loop().time
        self._stepping = asyncio.ensure_future(self._trainer.step(batch))
        metrics = await asyncio.shield(self._stepping)  # a run that is stopped waits for it
        self._stepped(metrics)
        if self._engines is None or (self.version % self._plan.publish_every and self.version < self._plan.steps):
            return
        began = clock()
        self._publication = await self._trainer.publish()
        self._engines.announce(self._publication)
        self._sink.emit(published(self._publication, clock() - began))
        self._published.set()

    def _stepped(self, metrics: StepMetrics) -> None:
        self._stepping, self.version = None, metrics.version
        self._source.finish_step()
        self._sink.emit(
            StepDone(
                version=metrics.version,
                seconds=metrics.seconds,
                tokens=metrics.tokens,
                values=metrics.values,
                tasks=metrics.tasks,
                gaps=metrics.gaps,
            )
        )
        for message in metrics.warnings:
            self._sink.emit(Warned(message=message))

    async def _swap(self, group: asyncio.TaskGroup, engines: PolicyServers) -> None:
        """Bring the engines to the newest version again and again, and evaluate it when that is due."""
        version = engines.target
        while version < self._plan.steps:
            await self._published.wait()
            self._published.clear()
            publication = self._publication
            assert publication is not None
            await self._source.prepare_swap(publication.version)
            if publication is self._publication:  # else a newer one was published meanwhile
                version = publication.version
                group.create_task(self._load(group, engines, publication))

    async def _load(self, group: asyncio.TaskGroup, engines: PolicyServers, publication: Publication) -> None:
        await engines.load(publication)
        self._evaluate_if_due(group, publication.version)

    async def _save(self, group: asyncio.TaskGroup) -> None:
        """Returns when training may go on."""
        if self._saving is not None:
            await self._saving
        clock = asyncio.get_running_loop().time
        began = clock()
        self._sink.emit(WorkStarted(work="checkpoint", version=self.version))
        await self._trainer.save(self._checkpoints / f"{self.version:06d}")
        self._copied = self.version
        self._saving = group.create_task(self._commit(self.version, began, clock() - began))

    async def _commit(self, version: int, began: float, blocked: float) -> None:
        if fault := await self._trainer.saved() or self._record(version):
            if version == self._plan.steps:
                raise RollartError(f"{fault}; make room and resume the run")
            self._sink.emit(Warned(message=f"{fault}; a restart would go back to the checkpoint before"))
            return
        self._committed = version
        self._on_saved(version)
        seconds = asyncio.get_running_loop().time() - began
        self._sink.emit(Checkpointed(version=version, seconds=seconds, blocked_s=blocked))

    def _record(self, version: int) -> str:
        """Why the ledger cannot record the checkpoint now."""
        try:
            self._ledger.commit(version)
        except DiskFull as error:
            return str(error)
        return ""

    async def _save_progress(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(GRACE_S):
                if self._stepping is not None:
                    self._stepped(await self._stepping)
                if self.version > self._committed:
                    if self.version != self._copied:
                        await self._trainer.save(self._checkpoints / f"{self.version:06d}")
                    await self._commit(self.version, began, clock() - began)
        except (TimeoutError, RollartError) as error:
            why = str(error) or f"the trainer needs more than {GRACE_S:g} s"
            lost = self.version - self._committed
            if lost or self._stepping is not None:
                again = f"`--resume` goes on from version {self._committed}"
                self._sink.emit(Warned(message=f"version {self.version} was not saved ({why}); {again}"))
        finally:
            if self._stepping is not None:
                self._stepping.cancel()

    def _evaluate_if_due(self, group: asyncio.TaskGroup, version: int) -> None:
        """One at a time: what falls due while an evaluation runs is made up for at the next swap."""
        every = self._plan.evaluate_every
        due = every and version // every > self._evaluated // every and version < self._plan.steps
        if due and (self._evaluation is None or self._evaluation.done()):
            self._evaluated = version
            self._evaluation = group.create_task(self._evaluator.run(version, self._plan.episodes))
