"""Light environments: many episodes of a task in one process, called in batches.

Invariants:
- Only an environment that declares `isolation = "shared"`, or whose task says so, shares a process.
- A process that hangs or ends takes no episode with it: each one is played again, action by action, in a process of its
  own, and goes on there. So one that hangs does so alone the second time, under its own deadline.
- After `MAX_LOSSES` lost processes the task shares none any more.
"""

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any

from rollart.core.errors import EnvironmentFailed, RollartError, ServiceError
from rollart.core.events import EnvironmentLost
from rollart.core.foreign import InvalidValue
from rollart.core.types import Message, Step
from rollart.envs.claim import EnvironmentClaim, TaskEnvironments
from rollart.envs.replies import parse_observation, parse_step
from rollart.workers.batching import Batcher
from rollart.workers.pool import ProcessClaim
from rollart.workers.worker_process import BatchedCall, CallRaised, ProcessLost

SHARED = "shared"
EPISODES = 256  # of one process
MAX_LOSSES = 3


async def declared_isolation(task: TaskEnvironments) -> str:
    """What the environment declares; `process` if it cannot be asked, for then its reset reports why."""
    try:
        async with task.pool.claim() as claim:
            await claim.acquire()
            return str(await claim.call("isolation", {"env": task.task.env}, task.config.reset_deadline))
    except (ProcessLost, CallRaised, ServiceError):
        return "process"


class SharedProcesses:
    """The shared processes of one task. `capacity` episodes at once; the others wait in order."""

    def __init__(self, task: TaskEnvironments, capacity: int) -> None:
        self.task = task
        self.in_use = 0
        self._room = asyncio.Semaphore(capacity)
        self._free = list(range(capacity))
        self._losses = 0
        self._processes = [_SharedProcess(self) for _ in range(-(-capacity // EPISODES))]

    @property
    def given_up(self) -> bool:
        return self._losses >= MAX_LOSSES

    async def take(self) -> int:
        """A free slot."""
        await self._room.acquire()
        self.in_use += 1
        return self._free.pop()

    def release(self, slot: int) -> None:
        self.in_use -= 1
        self._free.append(slot)
        self._room.release()

    async def call(self, slot: int, name: str, args: dict[str, object]) -> Any:
        """Raises ProcessLost or CallRaised."""
        reply = await self._processes[slot % len(self._processes)].batcher.call((slot, name, args))
        if "error" in reply:
            raise CallRaised(str(reply["error"]))
        return reply["value"]

    def lost(self, reason: str, episodes: int) -> None:
        self._losses += 1
        again = f"{reason}; {episodes} episodes that shared it are played again in processes of their own"
        self.task.emit(EnvironmentLost(task=self.task.task.name, call="step", reason=again, retried=True))


class _SharedProcess:
    def __init__(self, owner: SharedProcesses) -> None:
        self._owner = owner
        self._claim: ProcessClaim | None = None
        self._known: set[int] = set()  # slots with an episode in this process
        self.batcher: Batcher[BatchedCall, dict[str, Any]] = Batcher(self._send, lambda: EPISODES)

    async def _send(self, calls: Any) -> list[dict[str, Any] | Exception]:
        config, pool = self._owner.task.config, self._owner.task.pool
        fresh = self._claim is None
        if self._claim is None:
            self._claim = pool.extra_claim()
            self._known = set()
        try:
            if fresh:
                await self._claim.acquire()
            # Another episode's process was lost: what it had there is gone.
            gone = {slot for slot, name, _ in calls if name != "reset" and slot not in self._known}
            here = [call for call in calls if call[0] not in gone]
            self._known |= {slot for slot, _, _ in here}
            resets = any(name == "reset" for _, name, _ in here)
            deadline = config.reset_deadline if resets else config.step_deadline
            replies = iter(await self._claim.call_all(here, deadline) if here else [])
            return [ProcessLost("its process was lost") if call[0] in gone else next(replies) for call in calls]
        except RollartError as error:
            pool.end_extra(self._claim)
            self._claim = None
            self._owner.lost(str(error), len(calls))
            raise ProcessLost(str(error)) from error


class SharedEnvironment:
    """Implements `rollart.core.protocols.ClaimedEnvironment`: an episode in a shared process, or, after that was lost,
    in one of its own."""

    def __init__(self, shared: SharedProcesses, held_out: bool, slot: int, stack: AsyncExitStack) -> None:
        self._shared, self._held_out, self._slot, self._stack = shared, held_out, slot, stack
        self._own: EnvironmentClaim | None = None
        self._seed = 0
        self._actions: list[str] = []
        self._last: tuple[Message, ...] = ()

    async def reset(self, seed: int) -> tuple[Message, ...]:
        """Raises EnvironmentFailed."""
        task = self._shared.task
        self._seed, self._actions = seed, []
        if self._own is None:
            task.counts.resets += 1
            args = {"env": task.task.env, "args": task.task.env_args, "held_out": self._held_out, "seed": seed}
            try:
                self._last = parse_observation(await self._shared.call(self._slot, "reset", args))
                return self._last
            except (ProcessLost, CallRaised, ServiceError, InvalidValue):
                task.counts.failed_tries += 1
        self._last = await (await self._moved()).reset(seed)
        return self._last

    async def step(self, action: str) -> Step:
        """Raises EnvironmentFailed."""
        task = self._shared.task
        if self._own is not None:
            return await self._own.step(action)
        try:
            step = parse_step(await self._shared.call(self._slot, "step", {"action": action}))
        except (ProcessLost, ServiceError):
            return await (await self._replayed()).step(action)
        except (CallRaised, InvalidValue) as error:
            with suppress(ProcessLost, CallRaised):
                await self._shared.call(self._slot, "close", {})  # the next episode gets another object
            task.counts.failed_steps += 1
            task.emit(EnvironmentLost(task=task.task.name, call="step", reason=str(error)))
            raise EnvironmentFailed(f"the environment of task {task.task.name!r} failed in a step: {error}") from error
        self._actions.append(action)
        self._last = step.messages
        return step

    async def _moved(self) -> EnvironmentClaim:
        """A process of its own."""
        if self._own is None:
            try:
                claim = await self._stack.enter_async_context(self._shared.task.pool.claim())
            except (ProcessLost, ServiceError) as error:
                name = self._shared.task.task.name
                raise EnvironmentFailed(f"task {name!r} has no environment: {error}") from error
            claim.reusable = False
            self._own = EnvironmentClaim(self._shared.task, self._held_out, claim)
        return self._own

    async def _replayed(self) -> EnvironmentClaim:
        """A process of its own, with the episode as it was."""
        own = await self._moved()
        last = await own.reset(self._seed)
        for action in self._actions:
            last = (await own.step(action)).messages
        if last != self._last:
            raise EnvironmentFailed(
                f"the environment of task {self._shared.task.task.name!r} lost its shared process, and its episode,"
                " played again, was another one; give the task `isolation: process`"
            )
        return own
