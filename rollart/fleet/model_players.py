"""What plays episodes without training: a saved model on engines of its own, or a model that someone else serves."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.fleet.controller import make_runner, rollout_tasks
from rollart.fleet.endpoint import ModelEndpoint, endpoint_runner, without_limits
from rollart.fleet.fleet import Fleet
from rollart.fleet.session import Session
from rollart.rollout.evaluation import EpisodeRunner
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.trajectory import RolloutTask
from rollart.training.client import model_folder


@dataclass(frozen=True, slots=True)
class ModelPlayers:
    """`watch` returns never, and raises when what plays is gone."""

    runner: EpisodeRunner
    tasks: list[RolloutTask]
    watch: Callable[[], Awaitable[Any]]


@asynccontextmanager
async def model_players(session: Session, model: Path | ModelEndpoint) -> AsyncIterator[ModelPlayers]:
    run, directory, log = session.run, session.directory, session.log
    tasks = rollout_tasks(run)
    if isinstance(model, ModelEndpoint):
        async with endpoint_runner(run, model, directory / "logs", log) as runner:
            yield ModelPlayers(runner, without_limits(tasks), asyncio.Event().wait)
        return
    async with model_folder(model) as folder, Fleet(run, directory, log, model=folder, trainer=False) as fleet:
        yield ModelPlayers(make_runner(run, fleet, log, PhaseChanges()), tasks, fleet.supervise)
