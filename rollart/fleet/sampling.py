"""`rollart sample`: trajectories of the run's tasks by its own model, a model folder or an endpoint, as a file.

The ledger is the record: what an interrupted sampling has played is there, and `samples.jsonl` is written from it at
the end, in the order of the plan, so that the same run gives the same file.
"""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollart.config import RunFile
from rollart.core.errors import ConfigError, RollartError
from rollart.core.events import Warned
from rollart.core.types import Trajectory
from rollart.fleet.endpoint import ModelEndpoint
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.fleet.model_players import model_players
from rollart.fleet.session import OnLog, Session, run_stage
from rollart.fleet.supervision import supervised
from rollart.fleet.warmup import first_model
from rollart.observe.metrics import Metrics
from rollart.rollout.evaluation import evaluated
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.sampling import SamplePlan, Sampler
from rollart.rollout.trajectory import RolloutTask

SOURCE = "source.json"
NAMES = {"jsonl": "samples.jsonl", "parquet": "samples.parquet"}


class SampleSource(msgspec.Struct, frozen=True):
    """What plays: the run's own model; the folder `model`; or the `model` of this name at `endpoint`."""

    model: str = ""
    endpoint: str = ""


async def sample(
    run: RunFile,
    directory: Path,
    source: SampleSource,
    *,
    resume: bool = False,
    on_log: OnLog | None = None,
    metrics: Metrics | None = None,
) -> Path:
    """Play what `run.sample` asks for and is not in `directory` yet; returns the file of trajectories."""
    if run.sample.format == "parquet":
        _arrow()
    stage = partial(_sample, source=source)
    await run_stage(
        stage,
        run,
        directory,
        steps=0,
        work="sample",
        model=_named(source) if source.model else "",
        resume=resume,
        on_log=on_log,
        metrics=metrics,
    )
    return directory / NAMES[run.sample.format]


async def _sample(session: Session, source: SampleSource) -> None:
    run, log, plan = session.run, session.log, _plan(session.run)
    _check_source(session.directory / SOURCE, source)
    done = {played.id for played in session.ledger.trajectories() if played.outcome.trainable}
    tasks: list[RolloutTask] = []
    try:
        async with model_players(session, await _model(session, source)) as players:
            tasks = [task for task in players.tasks if task.weight or plan.held_out]
            with closing(LedgerWriter(session.ledger, log.flush)) as ledger:
                parallel = run.environments.processes * len(tasks)
                sampler = Sampler(players.runner, ledger, parallel=parallel, retries=run.rollout.retries)
                await supervised(players.watch(), sampler.run(plan, tasks, done))
    finally:
        if tasks:
            await asyncio.to_thread(_write, session, plan, tasks)


def _plan(run: RunFile) -> SamplePlan:
    config = run.sample
    return SamplePlan(config.episodes, config.samples, held_out=config.held_out, seed=run.seed)


def _check_source(path: Path, source: SampleSource) -> None:
    """Samples of two models must not end in one file."""
    if not path.exists():
        path.write_bytes(msgspec.json.encode(source))
    elif (before := msgspec.json.decode(path.read_bytes(), type=SampleSource)) != source:
        raise RollartError(
            f"{path.parent} has samples of {_named(before)}, not of {_named(source)}; use another directory"
        )


def _named(source: SampleSource) -> str:
    return f"{source.model or 'the model of the run'}{f' at {source.endpoint}' if source.endpoint else ''}"


async def _model(session: Session, source: SampleSource) -> Path | ModelEndpoint:
    if source.endpoint:
        return ModelEndpoint(source.endpoint, source.model)
    return Path(source.model) if source.model else await first_model(session.run, session.directory, session.log)


def _write(session: Session, plan: SamplePlan, tasks: list[RolloutTask]) -> None:
    """The file, of all that was played, and the results by task."""
    path, rows = session.directory / NAMES[session.run.sample.format], []
    for task in tasks:
        played = list(_played(session.ledger, plan, task))
        completed = [trajectory for trajectory in played if trajectory.outcome.trainable]
        rows += [_row(trajectory) for trajectory in completed]
        if completed:
            failed, samples = len(played) - len(completed), plan.samples
            session.log.emit(evaluated(completed, version=0, failed=failed, samples=samples, final=True))
        if len(completed) < len(played):
            last = next(trajectory for trajectory in reversed(played) if not trajectory.outcome.trainable)
            what = f"{len(played) - len(completed)} attempts of task {task.name} failed and are not in the file"
            session.log.emit(Warned(message=f"{what}; the last: {last.outcome}: {last.reason}"))
    draft = path.with_suffix(".part")
    _FORMATS[session.run.sample.format](draft, rows)
    draft.rename(path)


def _played(ledger: SqliteLedger, plan: SamplePlan, task: RolloutTask) -> Iterator[Trajectory]:
    for group in plan.groups(task):
        yield from ledger.group(group, limit=plan.samples)


def _row(trajectory: Trajectory) -> dict[str, Any]:
    """`messages` is a conversation as files of conversations have it: of several segments, the longest."""
    segments: dict[int, list[dict[str, str]]] = {}
    for turn in trajectory.turns:
        messages = segments.setdefault(turn.segment, [])
        messages += [{"role": message.role, "content": message.content} for message in turn.messages]
        messages.append({"role": "assistant", "content": turn.action})
    return {
        "id": trajectory.id,
        "task": trajectory.task,
        "episode": trajectory.group,
        "seed": trajectory.seed,
        "outcome": trajectory.outcome.value,
        "reward": trajectory.reward,
        "success": trajectory.success,
        "messages": max(segments.values(), key=len, default=[]),
        "turn_rewards": [turn.reward for turn in trajectory.turns],
        "parts": trajectory.parts,
        "info": trajectory.info,
        "prompt_tokens": trajectory.total_tokens - trajectory.action_tokens,
        "action_tokens": trajectory.action_tokens,
    }


def _write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    with open(path, "wb") as file:
        file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """What differs from row to row in its keys is JSON text."""
    arrow, parquet = _arrow()
    text = ("parts", "info")
    flat = [{**row, **{key: msgspec.json.encode(row[key]).decode() for key in text}} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(flat), path)


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError("sample.format: parquet needs pyarrow: pip install 'rollart[frames]'") from None
    return pyarrow, parquet


_FORMATS = {"jsonl": _write_jsonl, "parquet": _write_parquet}
