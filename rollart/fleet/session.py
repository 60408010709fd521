"""What every pipeline has in common: one run folder with its lock, run file, event log, ledger, summary and resume.

A pipeline is a stage, a coroutine that works in a session: `rollart train`, `sft`, `dpo`, `eval` and `sample` differ
only in that. Invariants: one process at a time works in a folder; every session ends with `RunEnded` in the log,
whatever ended it, and with a summary.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.config import RunFile, loading
from rollart.core import gc_tuning, run_folder
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import RunEnded, RunStarted, StepDone
from rollart.fleet import provenance
from rollart.fleet.supervision import root_cause, terminable
from rollart.observe import summary
from rollart.observe.metrics import Metrics
from rollart.observe.snapshot import words_of
from rollart.rollout.ledger import Recovery, SqliteLedger

OnLog = Callable[[EventLog], None]


@dataclass(frozen=True, slots=True)
class Session:
    """`recovery` is where an earlier session in this folder stopped."""

    run: RunFile
    directory: Path
    log: EventLog
    ledger: SqliteLedger
    recovery: Recovery


async def run_stage(
    stage: Callable[[Session], Awaitable[None]],
    run: RunFile,
    directory: Path,
    *,
    steps: int,
    work: str = "train",
    model: str = "",
    resume: bool = False,
    on_log: OnLog | None = None,
    metrics: Metrics | None = None,
) -> dict[str, Any]:
    """Carry out `stage`, of `steps` training steps, and leave everything in `directory`; the log calls it `work`.
    `model` is the one that plays, if it is not that of the run. `metrics` gets every event before the listeners of
    `on_log` do. Returns the summary."""
    metrics = metrics or Metrics()
    gc_tuning.collect_rarely()
    if resume:
        _check_same_run(run, directory)
    directory.mkdir(parents=True, exist_ok=True)
    with run_folder.exclusive(directory), contextlib.closing(open_ledger(run, directory)) as ledger:
        recovery = ledger.recover()
        if recovery.version > steps:
            raise RollartError(
                f"{directory} is at version {recovery.version} already, beyond training.steps {run.training.steps}"
            )
        (directory / "run.yaml").write_text(loading.dump(run))
        with event_log(directory, on_log, metrics) as log:
            trained = [recovery.version]
            log.subscribe(lambda event: trained.append(event.version) if isinstance(event, StepDone) else None)
            log.emit(_started(run, recovery, resume=resume, steps=steps, work=work, model=model))
            try:
                with terminable():
                    await stage(Session(run, directory, log, ledger, recovery))
            except BaseException as error:
                reason = "interrupted" if isinstance(error, asyncio.CancelledError) else str(root_cause(error))
                log.emit(RunEnded(version=trained[-1], reason=reason))
                log.close()
                summary.write(directory, metrics.snapshot())
                raise root_cause(error) from error
            log.emit(RunEnded(version=trained[-1], reason="finished"))
    return summary.write(directory, metrics.snapshot())


def _started(run: RunFile, recovery: Recovery, *, resume: bool, steps: int, work: str, model: str) -> RunStarted:
    return RunStarted(
        name=run.name,
        preset=run.rollout.preset,
        alpha=run.rollout.schedule().alpha,
        seed=run.seed,
        steps=steps,
        tasks=[task.name for task in run.tasks if words_of(work).plays],
        version=recovery.version,
        resumed=resume,
        wall=time.time(),
        emulated=[
            f"{name}: {pool.devices[0]} (1/{pool.emulate:g})" for name, pool in run.pools.items() if pool.emulate
        ],
        model=model or str(run.model.path or "tiny"),
        packages=provenance.packages(),
        digest=provenance.digest(loading.dump(run)),
        commit=provenance.commit(),
        price=provenance.price(run),
        work=work,
    )


def _check_same_run(run: RunFile, directory: Path) -> None:
    """A run resumes with the model that it started with; everything else may change."""
    stored = directory / "run.yaml"
    if not stored.exists():
        raise RollartError(f"{directory} has no run to resume")
    if loading.load(stored).model != run.model:
        raise RollartError(
            f"`model` differs from that of the run in {directory}; resume with the same model, or use another directory"
        )


@contextlib.contextmanager
def event_log(directory: Path, on_log: OnLog | None, metrics: Metrics | None = None) -> Iterator[EventLog]:
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


def open_ledger(run: RunFile, directory: Path) -> SqliteLedger:
    keep = run.ledger.keep
    return SqliteLedger.open(directory / "ledger.sqlite", None if keep == "all" else keep)
