"""One leased environment, as a trajectory sees it.

The invariants:
- What an environment answers is checked before anybody sees it; whatever is wrong with it is EnvironmentFailed, never
  a reward and never another exception.
- A reset is tried again on a fresh process, with back-off, and on another host if one has room. A failed step is
  final: the state it belonged to is gone.
- A reset that takes longer than ordinary ones do (90% of them, unless configured) gets a second one, of the same seed,
  beside it. The first that answers well is the environment; the other's process is killed. Both end with the reset.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed, ServiceError
from rollart.core.events import EnvironmentLost, EventSink, ResetHedged
from rollart.core.types import Message, Step
from rollart.envs.answers import WrongAnswer, observation, step
from rollart.envs.latencies import Latencies
from rollart.workers.lease import Lease
from rollart.workers.slot import CallRaised, SlotLost
from rollart.workers.slots import SlotPool

BACK_OFF_S = 0.1
FLOOR_S = 0.1  # no reset is slow before
LOOK_AGAIN = 0.25  # of the time waited so far, while nobody knows what is slow, or no second reset may begin
FAILURES = (SlotLost, CallRaised, ServiceError, WrongAnswer)

Observation = tuple[Message, ...]


@dataclass(slots=True)
class Counts:
    """Of one task. `failed_tries` lost a process each, `failed_resets` were given up after the last retry. `hedges` are
    second resets, of which so many won and lost; the others were cancelled, or failed along with the first."""

    resets: int = 0
    retries: int = 0
    failed_tries: int = 0
    failed_resets: int = 0
    failed_steps: int = 0
    hedges: int = 0
    hedges_won: int = 0
    hedges_lost: int = 0


@dataclass(slots=True)
class TaskEnvironments:
    """What the leases of one task share. `reusable` is what the environment says of itself, once it was asked."""

    task: TaskConfig
    config: EnvironmentsConfig
    pool: SlotPool
    latencies: Latencies
    sink: EventSink | None = None
    counts: Counts = field(default_factory=Counts)
    reusable: bool | None = None

    def tell(self, event: ResetHedged | EnvironmentLost) -> None:
        if self.sink is not None:
            self.sink.emit(event)


class EnvironmentLease:
    """One environment, ours alone. `reset` comes first, and again after a failed step."""

    def __init__(self, shared: TaskEnvironments, held_out: bool, lease: Lease) -> None:
        self._shared = shared
        self._held_out = held_out
        self._lease = lease
        self._used = False

    async def reset(self, seed: int) -> Observation:
        """Raises EnvironmentFailed."""
        task, counts = self._shared.task, self._shared.counts
        tries = self._shared.config.retries + 1
        counts.resets += 1
        if self._used and not self._shared.reusable:
            self._lease.drop()
        self._used = True
        for number in range(tries):
            try:
                with self._undone():
                    return await self._hedged(seed, fresh=number > 0)
            except FAILURES as error:
                failure = error
            again = number + 1 < tries
            self._shared.tell(EnvironmentLost(task=task.name, call="reset", reason=str(failure), retried=again))
            if again:
                counts.retries += 1
                await asyncio.sleep(BACK_OFF_S * 2**number)
        counts.failed_resets += 1
        raise EnvironmentFailed(
            f"the environment of task {task.name!r} could not be reset in {tries} tries; the last: {failure}"
        ) from failure

    async def step(self, action: str) -> Step:
        """Raises EnvironmentFailed."""
        task, config = self._shared.task, self._shared.config
        try:
            return step(await self._lease.call("step", {"action": action}, config.step_deadline))
        except FAILURES as error:
            self._lease.drop()
            self._shared.counts.failed_steps += 1
            self._shared.tell(EnvironmentLost(task=task.name, call="step", reason=str(error)))
            raise EnvironmentFailed(f"the environment of task {task.name!r} failed in a step: {error}") from error

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What did not come to a good end leaves no process behind."""
        try:
            yield
        except BaseException:
            self._lease.drop()
            raise

    async def _hedged(self, seed: int, fresh: bool) -> Observation:
        """One try: a reset, and a second one beside it if it is slow."""
        await self._take(self._lease, fresh)
        if not self._shared.config.hedges:
            return await self._reset(self._lease, seed)
        clock = asyncio.get_running_loop().time
        began = clock()
        first = asyncio.create_task(self._reset(self._lease, seed))
        try:
            while not first.done():
                waited = clock() - began
                slow = self._shared.latencies.slow_after
                if slow is not None and waited >= max(slow, FLOOR_S):
                    with self._shared.pool.spare(self._lease) as spare:
                        if spare is not None:
                            return await self._race(first, spare, seed)
                    slow = None
                left = max(slow, FLOOR_S) - waited if slow is not None else max(waited * LOOK_AGAIN, FLOOR_S)
                await asyncio.wait([first], timeout=left)
            return first.result()
        finally:
            await _end(first)

    async def _race(self, first: asyncio.Task[Observation], spare: Lease, seed: int) -> Observation:
        """The first of two that answers well; what the first raised if neither does."""
        counts = self._shared.counts
        counts.hedges += 1
        won = False
        second = asyncio.create_task(self._second(spare, seed))
        try:
            while running := [task for task in (first, second) if not task.done()]:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if first.done() and first.exception() is None:
                    counts.hedges_lost += 1
                    break
                if second.done() and second.exception() is None:
                    counts.hedges_won += 1
                    won = True
                    await _end(first)
                    self._lease.take_over(spare)
                    return second.result()
            return first.result()
        finally:
            self._shared.tell(ResetHedged(task=self._shared.task.name, won=won))
            await _end(second)

    async def _second(self, spare: Lease, seed: int) -> Observation:
        await self._take(spare, fresh=False)
        return await self._reset(spare, seed)

    async def _take(self, lease: Lease, fresh: bool) -> None:
        if not lease.held:
            with self._counted():
                await lease.take(fresh)

    async def _reset(self, lease: Lease, seed: int) -> Observation:
        task, config = self._shared.task, self._shared.config
        args = {"env": task.env, "args": task.args, "held_out": self._held_out, "seed": seed}
        with self._counted():
            with self._shared.latencies.measured():
                answer = observation(await lease.call("reset", args, config.reset_deadline))
            if self._shared.reusable is None:
                self._shared.reusable = bool(await lease.call("reusable", {}, config.step_deadline))
        return answer

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except FAILURES:
            self._shared.counts.failed_tries += 1
            raise


async def _end(task: asyncio.Task[Observation]) -> None:
    """Cancel it, which kills the process that it waits for, and see it through."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # seen: it was raised to somebody, or another answered well
