"""Environments, leased one by one from worker processes, on one or more hosts per task.

The invariants:
- What an environment answers is checked before anybody sees it; whatever is wrong with it is EnvironmentFailed, never
  a reward and never another exception.
- A reset is tried again on a fresh process, with back-off, and on another host if one has room. A failed step is
  final: the state it belonged to is gone.
- Tasks share nothing: a task that fails, floods or hangs takes slots and time from itself alone.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rollart.config import Environments, Task
from rollart.envs.answers import WrongAnswer, observation, step
from rollart.errors import EnvironmentFailed, ServiceError
from rollart.resources.launcher import Launcher, Wish
from rollart.resources.local import LocalLauncher
from rollart.types import Message, Step
from rollart.workers.process import HostSpec, Place
from rollart.workers.seat import Tell
from rollart.workers.slot import CallRaised, SlotLost
from rollart.workers.slots import Lease, SlotPool

SHIM = "{rollart}/envs/shim.py:EnvironmentShim"
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
    """Implements `rollart.protocols.EnvironmentPool`. What environments print goes to `log`, if given.

    Each task has one host for each of the `wishes` (none: a single one) and its slots split over them in proportion to
    what these wish for, which the tasks share. `launcher` starts them; without one they run on this machine. `tell`
    hears of each host that started, and again, with the reason, when it died.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        config: Environments,
        log: Path | None = None,
        launcher: Launcher | None = None,
        wishes: Sequence[Wish] = (),
        tell: Tell | None = None,
    ) -> None:
        self._config = config
        self._launcher = launcher or LocalLauncher()
        self._tasks = {task.name: task for task in tasks}
        self._pools = {
            task.name: SlotPool(
                HostSpec(SHIM, (task.env,), log=log, name=f"host of {task.name} environments"),
                config.slots,
                farewell="close",
                places=[self._place(wish) for wish in wishes or [Wish()]],
                tell=tell,
            )
            for task in tasks
        }

    def _place(self, wish: Wish) -> Place:
        return Place(self._launcher, replace(wish, count=wish.count / len(self._tasks)))

    @property
    def in_use(self) -> int:
        return sum(pool.in_use for pool in self._pools.values())

    @property
    def slots(self) -> int:
        return self._config.slots * len(self._pools)

    async def start(self) -> None:
        """Raises ServiceError, for example for a module that cannot be imported."""
        await self._each(lambda pool: pool.start())

    async def add(self, wish: Wish) -> None:
        """One more host for each task, while others run. Raises ServiceError."""
        await self._each(lambda pool: pool.add(self._place(wish)))

    async def _each(self, do: Callable[[SlotPool], Awaitable[None]]) -> None:
        results = await asyncio.gather(*map(do, self._pools.values()), return_exceptions=True)
        for task, result in zip(self._pools, results, strict=True):
            if isinstance(result, ServiceError):
                raise ServiceError(f"the environment of task {task!r} cannot start: {result}") from result
            if result is not None:
                raise result

    async def watch(self) -> NoReturn:
        """Wait until some task has no host left. Raises ServiceError."""
        async with asyncio.TaskGroup() as group:
            for pool in self._pools.values():
                group.create_task(pool.watch())
        raise AssertionError("unreachable")

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    @asynccontextmanager
    async def lease(self, task: str, held_out: bool) -> AsyncIterator[EnvironmentLease]:
        """Raises EnvironmentFailed when there is no host any more."""
        async with AsyncExitStack() as stack:
            try:
                lease = await stack.enter_async_context(self._pools[task].lease())
            except (SlotLost, ServiceError) as error:
                raise EnvironmentFailed(f"task {task!r} has no environment: {error}") from error
            yield EnvironmentLease(self._tasks[task], self._config, held_out, lease)
