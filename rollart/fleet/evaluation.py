"""`rollart eval`: the held-out episodes of every task, played by a saved model or by one that someone else serves."""

from contextlib import closing
from pathlib import Path
from typing import Any

from rollart.config import RunFile
from rollart.core.events import Evaluated
from rollart.fleet.controller import held_out_rows
from rollart.fleet.endpoint import ModelEndpoint
from rollart.fleet.ledger_writer import LedgerWriter
from rollart.fleet.model_players import model_players
from rollart.fleet.session import OnLog, Session, run_stage
from rollart.fleet.supervision import supervised
from rollart.rollout.evaluation import Evaluator


async def evaluate(
    run: RunFile, model: Path | ModelEndpoint, *, directory: Path, on_log: OnLog | None = None
) -> dict[str, Any]:
    """Run the held-out episodes of every task with the policy in a folder, or with a model behind an endpoint."""
    results: list[Evaluated] = []

    async def stage(session: Session) -> None:
        results.extend(await _play(session, model))

    name = f"{model.model} at {model.url}" if isinstance(model, ModelEndpoint) else str(model)
    await run_stage(stage, run, directory, steps=0, work="eval", model=name, on_log=on_log)
    tasks = {result.task: _result(result) for result in results}
    return {"model": model.model if isinstance(model, ModelEndpoint) else str(model), "tasks": tasks}


async def _play(session: Session, model: Path | ModelEndpoint) -> list[Evaluated]:
    run, log = session.run, session.log
    async with model_players(session, model) as players:
        with closing(LedgerWriter(session.ledger, log.flush)) as ledger:
            samples, rows = run.evaluation.samples, held_out_rows(run)
            evaluator = Evaluator(players.tasks, players.runner, ledger, log, samples=samples, available=rows)
            played = evaluator.run(0, run.evaluation.final_episodes, final=True)
            results: list[Evaluated] = await supervised(players.watch(), played)
            return results


def _result(result: Evaluated) -> dict[str, float | None]:
    return {
        "success": result.success,
        "reward": result.reward,
        "episodes": result.episodes,
        "failed": result.failed,
        "samples": result.samples,
        "passed": result.passed,
    }
