"""One claimed environment, as a trajectory sees it.

The invariants:
- What an environment returns is checked before it is used; whatever is wrong with it is EnvironmentFailed, never a
  reward and never another exception.
- A reset is retried on a fresh process, with backoff, and on another host if one has room. A failed step is final: the
  state it belonged to is gone.
- A reset that takes longer than ordinary ones do (90% of them, unless configured) is raced by a second one of the same
  seed. The first that succeeds is the environment; the other's process is killed. Both end with the reset.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed, ServiceError
from rollart.core.events import EnvironmentLost, EventSink, ResetHedged
from rollart.core.foreign import InvalidValue
from rollart.core.types import Message, Step
from rollart.envs.latencies import Latencies
from rollart.envs.replies import parse_observation, parse_step
from rollart.workers.pool import ProcessClaim, ProcessPool
from rollart.workers.worker_process import CallRaised, ProcessLost

BACKOFF_S = 0.1
SLOW_MIN_S = 0.1  # no reset is slow before
CHECK_AGAIN = 0.25  # of the time waited so far, while it is not known what is slow, or no second reset may start
FAILURES = (ProcessLost, CallRaised, ServiceError, InvalidValue)

Observation = tuple[Message, ...]


@dataclass(slots=True)
class EnvironmentCounts:
    """Of one task. `failed_tries` lost a process each, `failed_resets` were given up after the last retry. `hedges` are
    second resets; those that neither won nor lost were cancelled, or failed along with the first."""

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
    """What the claims of one task share. `reusable` is what the environment declares, None until known."""

    task: TaskConfig
    config: EnvironmentsConfig
    pool: ProcessPool
    latencies: Latencies
    sink: EventSink | None = None
    counts: EnvironmentCounts = field(default_factory=EnvironmentCounts)
    reusable: bool | None = None

    def emit(self, event: ResetHedged | EnvironmentLost) -> None:
        if self.sink is not None:
            self.sink.emit(event)


class EnvironmentClaim:
    """The exclusive right to one environment. `reset` comes first, and again after a failed step."""

    def __init__(self, shared: TaskEnvironments, held_out: bool, claim: ProcessClaim) -> None:
        self._shared = shared
        self._held_out = held_out
        self._claim = claim
        self._used = False

    async def reset(self, seed: int) -> Observation:
        """Raises EnvironmentFailed."""
        task, counts = self._shared.task, self._shared.counts
        tries = self._shared.config.retries + 1
        counts.resets += 1
        if self._used and not self._shared.reusable:
            self._claim.kill()
        self._used = True
        for number in range(tries):
            try:
                return await self._hedged(seed, fresh=number > 0)
            except asyncio.CancelledError:  # which its call has seen to
                raise
            except BaseException as error:
                self._claim.kill()
                if not isinstance(error, FAILURES):
                    raise
                failure = error
            again = number + 1 < tries
            self._shared.emit(EnvironmentLost(task=task.name, call="reset", reason=str(failure), retried=again))
            if again:
                counts.retries += 1
                await asyncio.sleep(BACKOFF_S * 2**number)
        counts.failed_resets += 1
        raise EnvironmentFailed(
            f"the environment of task {task.name!r} could not be reset in {tries} tries; the last: {failure}"
        ) from failure

    async def step(self, action: str) -> Step:
        """Raises EnvironmentFailed."""
        task, config = self._shared.task, self._shared.config
        try:
            return parse_step(await self._claim.call("step", {"action": action}, config.step_deadline))
        except FAILURES as error:
            self._claim.kill()
            self._shared.counts.failed_steps += 1
            self._shared.emit(EnvironmentLost(task=task.name, call="step", reason=str(error)))
            raise EnvironmentFailed(f"the environment of task {task.name!r} failed in a step: {error}") from error

    async def _hedged(self, seed: int, fresh: bool) -> Observation:
        """One try: a reset, and a second one at the same time if it is slow."""
        await self._acquire(self._claim, fresh)
        if not self._shared.config.hedges:
            return await self._reset(self._claim, seed)
        clock = asyncio.get_running_loop().time
        began = clock()
        first = asyncio.create_task(self._reset(self._claim, seed))
        try:
            while not first.done():
                waited = clock() - began
                slow = self._shared.latencies.slow_after
                if slow is not None and waited >= max(slow, SLOW_MIN_S):
                    with self._shared.pool.spare_claim(self._claim) as spare:
                        if spare is not None:
                            return await self._race(first, spare, seed)
                    slow = None
                left = max(slow, SLOW_MIN_S) - waited if slow is not None else max(waited * CHECK_AGAIN, SLOW_MIN_S)
                await asyncio.wait([first], timeout=left)
            return first.result()
        finally:
            await _end(first)

    async def _race(self, first: asyncio.Task[Observation], spare: ProcessClaim, seed: int) -> Observation:
        """The first of two that succeeds; the exception of the first if neither does."""
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
                    self._claim.take_over(spare)
                    return second.result()
            return first.result()
        finally:
            self._shared.emit(ResetHedged(task=self._shared.task.name, won=won))
            await _end(second)

    async def _second(self, spare: ProcessClaim, seed: int) -> Observation:
        await self._acquire(spare, fresh=False)
        return await self._reset(spare, seed)

    async def _acquire(self, claim: ProcessClaim, fresh: bool) -> None:
        if not claim.has_process:
            with self._count_failure():
                await claim.acquire(fresh)

    async def _reset(self, claim: ProcessClaim, seed: int) -> Observation:
        task, config = self._shared.task, self._shared.config
        args = {"env": task.env, "args": task.env_args, "held_out": self._held_out, "seed": seed}
        claim.interruptible = bool(self._shared.reusable)
        with self._count_failure():
            with self._shared.latencies.measured():
                observation = parse_observation(await claim.call("reset", args, config.reset_deadline))
            if self._shared.reusable is None:
                self._shared.reusable = bool(await claim.call("reusable", {}, config.step_deadline))
        claim.interruptible = self._shared.reusable
        return observation

    @contextmanager
    def _count_failure(self) -> Iterator[None]:
        try:
            yield
        except FAILURES:
            self._shared.counts.failed_tries += 1
            raise


async def _end(task: asyncio.Task[Observation]) -> None:
    """Cancel it, which kills the process that it waits for, and wait until it has ended."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # marks it retrieved: it was raised already, or another reset succeeded
