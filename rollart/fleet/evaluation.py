"""`rollart eval`: the held-out episodes of every task, played by a saved model or by one that someone else serves."""

from contextlib import closing
from pathlib import Path
from typing import Any

from rollart.config import RunFile
from rollart.core.events import Evaluated
from rollart.fleet.controller import held_out_rows, make_runner, rollout_tasks
from rollart.fleet.endpoint import ModelEndpoint, endpoint_runner, without_limits
from rollart.fleet.fleet import Fleet
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.fleet.session import OnLog, Session, run_stage
from rollart.fleet.supervision import supervised
from rollart.rollout.evaluation import EpisodeRunner, Evaluator
from rollart.rollout.ledger import Ledger
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.trajectory import RolloutTask
from rollart.training.client import model_folder


async def evaluate(
    run: RunFile, model: Path | ModelEndpoint, *, directory: Path, on_log: OnLog | None = None
) -> dict[str, Any]:
    """Run the held-out episodes of every task with the policy in a folder, or with a model behind an endpoint."""
    results: list[Evaluated] = []

    async def stage(session: Session) -> None:
        results.extend(await (_served(session, model) if isinstance(model, ModelEndpoint) else _saved(session, model)))

    name = f"{model.model} at {model.url}" if isinstance(model, ModelEndpoint) else str(model)
    await run_stage(stage, run, directory, steps=0, work="eval", model=name, on_log=on_log)
    tasks = {result.task: _result(result) for result in results}
    return {"model": model.model if isinstance(model, ModelEndpoint) else str(model), "tasks": tasks}


async def _saved(session: Session, model: Path) -> list[Evaluated]:
    run, directory, log = session.run, session.directory, session.log
    with closing(LedgerWriter(session.ledger, log.flush)) as ledger:
        async with model_folder(model) as folder, Fleet(run, directory, log, model=folder, trainer=False) as fleet:
            runner = make_runner(run, fleet, log, PhaseChanges())
            played = _played(session, rollout_tasks(run), runner, ledger)
            results: list[Evaluated] = await supervised(fleet.supervise(), played)
            return results


async def _served(session: Session, endpoint: ModelEndpoint) -> list[Evaluated]:
    run = session.run
    async with endpoint_runner(run, endpoint, session.directory / "logs", session.log) as runner:
        return await _played(session, without_limits(rollout_tasks(run)), runner, session.ledger)


async def _played(session: Session, tasks: list[RolloutTask], runner: EpisodeRunner, ledger: Ledger) -> list[Evaluated]:
    run = session.run
    evaluator = Evaluator(
        tasks, runner, ledger, session.log, samples=run.evaluation.samples, available=held_out_rows(run)
    )
    return await evaluator.run(0, run.evaluation.final_episodes, final=True)


def _result(result: Evaluated) -> dict[str, float | None]:
    return {
        "success": result.success,
        "reward": result.reward,
        "episodes": result.episodes,
        "failed": result.failed,
        "samples": result.samples,
        "passed": result.passed,
    }
