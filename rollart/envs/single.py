"""One environment in a process of its own, for one player at a time: to play in the terminal, to try out a family."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed, ServiceError
from rollart.core.foreign import InvalidValue
from rollart.core.types import Message, Step
from rollart.envs.pool import host_spec
from rollart.envs.replies import parse_observation, parse_step
from rollart.workers.pool import ProcessClaim, ProcessPool
from rollart.workers.worker_process import CallRaised, ProcessLost

T = TypeVar("T")


class SingleEnvironment:
    """Every call has a deadline and raises EnvironmentFailed. Nothing is retried."""

    def __init__(self, task: TaskConfig, config: EnvironmentsConfig, claim: ProcessClaim) -> None:
        self._task = task
        self._config = config
        self._claim = claim

    async def reset(self, seed: int, held_out: bool) -> tuple[Message, ...]:
        args = {"env": self._task.env, "args": self._task.env_args, "held_out": held_out, "seed": seed}
        return await self._call("reset", args, self._config.reset_deadline, parse_observation)

    async def step(self, action: str) -> Step:
        return await self._call("step", {"action": action}, self._config.step_deadline, parse_step)

    async def scripted(self, seed: int) -> str:
        """The next action of the task's scripted player, which may look inside the environment."""
        args = {"player": self._task.player, "args": self._task.player_args, "seed": seed}
        return await self._call("act", args, self._config.step_deadline, str)

    async def demonstrate(self, seed: int, deadline: float) -> tuple[Any, ...]:
        """A whole training episode by the scripted player; see `EnvironmentProcess.demonstrate`."""
        task = self._task
        args = {"env": task.env, "args": task.env_args, "player": task.player, "player_args": task.player_args}
        return await self._call("demonstrate", {**args, "seed": seed, "turns": task.max_turns}, deadline, tuple)

    async def _call(self, name: str, args: Mapping[str, object], deadline: float, parse: Callable[[Any], T]) -> T:
        try:
            return parse(await self._claim.call(name, args, deadline))
        except (ProcessLost, CallRaised, InvalidValue) as error:
            what = "broke its protocol" if isinstance(error, InvalidValue) else "failed"
            raise EnvironmentFailed(f"the environment of task {self._task.name!r} {what}: {error}") from error


@asynccontextmanager
async def single_environment(
    task: TaskConfig, config: EnvironmentsConfig, log: Path | None = None, python: str | None = None
) -> AsyncIterator[SingleEnvironment]:
    """Raises ServiceError if it cannot start. `python` overrides that of the task's family."""
    pool = ProcessPool(host_spec(task, config, log, python), limit=1, close_call="close")
    try:
        await pool.start()
        async with pool.claim() as claim:
            await claim.acquire()
            yield SingleEnvironment(task, config, claim)
    except ProcessLost as error:
        raise ServiceError(f"the environment of task {task.name!r} cannot start: {error}") from error
    finally:
        await pool.close()
