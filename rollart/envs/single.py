"""One environment in a process of its own, for one player at a time: to play in the terminal, to try a family out."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed, ServiceError
from rollart.core.types import Message, Step
from rollart.envs import answers
from rollart.envs.worker import host_spec
from rollart.workers.lease import Lease
from rollart.workers.slot import CallRaised, SlotLost
from rollart.workers.slots import SlotPool

T = TypeVar("T")


class SingleEnvironment:
    """Every call has a deadline and raises EnvironmentFailed. Nothing is tried again."""

    def __init__(self, task: TaskConfig, config: EnvironmentsConfig, lease: Lease) -> None:
        self._task = task
        self._config = config
        self._lease = lease

    async def reset(self, seed: int, held_out: bool) -> tuple[Message, ...]:
        args = {"env": self._task.env, "args": self._task.args, "held_out": held_out, "seed": seed}
        return self._read(answers.observation, await self._call("reset", args, self._config.reset_deadline))

    async def step(self, action: str) -> Step:
        return self._read(answers.step, await self._call("step", {"action": action}, self._config.step_deadline))

    async def scripted(self, seed: int) -> str:
        """The next action of the task's scripted player, which may look inside the environment."""
        args = {"player": self._task.player, "args": self._task.player_args, "seed": seed}
        return str(await self._call("act", args, self._config.step_deadline))

    async def demonstrate(self, seed: int, deadline: float) -> Any:
        """A whole training episode by the scripted player, as it was answered; see the shim."""
        task = self._task
        args = {"env": task.env, "args": task.args, "player": task.player, "player_args": task.player_args}
        return await self._call("demonstrate", {**args, "seed": seed, "turns": task.max_turns}, deadline)

    async def _call(self, name: str, args: Mapping[str, object], deadline: float) -> Any:
        try:
            return await self._lease.call(name, args, deadline)
        except (SlotLost, CallRaised) as error:
            raise EnvironmentFailed(f"the environment of task {self._task.name!r} failed: {error}") from error

    def _read(self, read: Callable[[Any], T], answer: Any) -> T:
        try:
            return read(answer)
        except answers.WrongAnswer as error:
            raise EnvironmentFailed(
                f"the environment of task {self._task.name!r} broke its protocol: {error}"
            ) from error


@asynccontextmanager
async def stage(
    task: TaskConfig, config: EnvironmentsConfig, log: Path | None = None, python: str | None = None
) -> AsyncIterator[SingleEnvironment]:
    """Raises ServiceError if it cannot start. `python` is instead of the one of the task's family."""
    pool = SlotPool(host_spec(task, log, python), limit=1, farewell="close")
    try:
        await pool.start()
        async with pool.lease() as lease:
            await lease.take()
            yield SingleEnvironment(task, config, lease)
    except SlotLost as error:
        raise ServiceError(f"the environment of task {task.name!r} cannot start: {error}") from error
    finally:
        await pool.close()
