"""Environments, leased one by one from worker processes, one host per task.

The invariants:
- What an environment answers is checked before anybody sees it; whatever is wrong with it is EnvironmentFailed, never
  a reward and never another exception.
- A reset is tried again on a fresh process, with back-off. A failed step is final: the state it belonged to is gone.
- Tasks share nothing: a task that fails, floods or hangs takes slots and time from itself alone.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rollart.config import Environments, Task
from rollart.envs.answers import WrongAnswer, observation, step
from rollart.errors import EnvironmentFailed, ServiceError
from rollart.types import Message, Step
from rollart.workers.process import CallRaised, HostSpec, SlotLost
from rollart.workers.slots import Lease, SlotPool

SHIM = f"{Path(__file__).with_name('shim.py')}:EnvironmentShim"
BACK_OFF_S = 0.1


class EnvironmentLease:
    """One environment, ours alone. `reset` comes first, and again after a failed step."""

    def __init__(self, task: Task, config: Environments, held_out: bool, lease: Lease) -> None:
        self._task = task
        self._config = config
        self._held_out = held_out
        self._lease = lease

    async def reset(self, seed: int) -> tuple[Message, ...]:
        """Raises EnvironmentFailed."""
        args = {"env": self._task.env, "args": self._task.args, "held_out": self._held_out, "seed": seed}
        tries = self._config.retries + 1
        for number in range(tries):
            try:
                if not self._lease.held:
                    await self._lease.take(fresh=number > 0)
                return observation(await self._lease.call("reset", args, self._config.reset_deadline))
            except (SlotLost, CallRaised, ServiceError, WrongAnswer) as error:
                failure = error
                self._lease.drop()
            if number + 1 < tries:
                await asyncio.sleep(BACK_OFF_S * 2**number)
        raise EnvironmentFailed(
            f"the environment of task {self._task.name!r} could not be reset in {tries} tries; the last: {failure}"
        ) from failure

    async def step(self, action: str) -> Step:
        """Raises EnvironmentFailed."""
        try:
            return step(await self._lease.call("step", {"action": action}, self._config.step_deadline))
        except (SlotLost, CallRaised, WrongAnswer) as error:
            self._lease.drop()
            raise EnvironmentFailed(f"the environment of task {self._task.name!r} failed in a step: {error}") from error


class EnvironmentPool:
    """Implements `rollart.protocols.EnvironmentPool`. What environments print goes to `log`, if given."""

    def __init__(self, tasks: Sequence[Task], config: Environments, log: Path | None = None) -> None:
        self._config = config
        self._tasks = {task.name: task for task in tasks}
        self._pools = {
            task.name: SlotPool(HostSpec(SHIM, (task.env,), log=log), config.slots, farewell="close") for task in tasks
        }

    @property
    def in_use(self) -> int:
        return sum(pool.in_use for pool in self._pools.values())

    @property
    def slots(self) -> int:
        return self._config.slots * len(self._pools)

    async def start(self) -> None:
        """Raises ServiceError, for example for a module that cannot be imported."""
        results = await asyncio.gather(*(_start(*item) for item in self._pools.items()), return_exceptions=True)
        for result in results:
            if result is not None:
                raise result

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    @asynccontextmanager
    async def lease(self, task: str, held_out: bool) -> AsyncIterator[EnvironmentLease]:
        async with self._pools[task].lease() as lease:
            yield EnvironmentLease(self._tasks[task], self._config, held_out, lease)


async def _start(task: str, pool: SlotPool) -> None:
    try:
        await pool.start()
    except ServiceError as error:
        raise ServiceError(f"the environment of task {task!r} cannot start: {error}") from error
