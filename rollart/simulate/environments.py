"""Modelled environments, and the renderer that goes with them: messages that say only how long they are.

A trajectory's luck is a function of the seed of its group and of how many members came before it, so it is the same
under every schedule. The content of a message is the number of its tokens; that of an opening also has its seed.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

from rollart.compact import Runs, run_of
from rollart.config import Environments
from rollart.errors import EnvironmentFailed
from rollart.rollout.seeds import seed_of
from rollart.simulate.scenario import Scenario, Workload
from rollart.simulate.spread import Draw, draw_of
from rollart.types import Finish, Message, Step

_REMEMBERED = 200_000  # seeds of groups that may still get another member


class _Task:
    """The draws of one task, its slots, and who waits for them."""

    def __init__(self, workload: Workload, config: Environments) -> None:
        self.turns, self.prompt = draw_of(workload.turns), draw_of(workload.prompt)
        self.observation, self.reset = draw_of(workload.observation), draw_of(workload.reset)
        self.step, self.delay = draw_of(workload.step), draw_of(workload.delay)
        self.workload, self.slots = workload, asyncio.Semaphore(config.slots)
        self.hedge_after = self.reset(config.hedge_after) if config.hedges else float("inf")


@dataclass(slots=True)
class ModelledEnvironment:
    pool: "ModelledEnvironments"
    task: _Task
    luck: random.Random = field(default_factory=lambda: random.Random(0))
    left: int = 0

    async def reset(self, seed: int) -> tuple[Message, ...]:
        pool, task = self.pool, self.task
        self.luck = luck = random.Random(seed_of(seed, pool.occurrence(seed)))
        self.left = max(1, round(task.turns(luck.random())))
        pool.resetting += 1
        try:
            await self._reset(luck)
        finally:
            pool.resetting -= 1
        tokens = max(1, round(task.prompt(seed / 0x7FFFFFFF)))
        return (Message("user", f"{tokens} {seed}"),)

    async def _reset(self, luck: random.Random) -> None:
        """Tried again on a fresh one when it fails or takes too long; raced by a second one once it is slow."""
        config, task = self.pool.config, self.task
        for _ in range(config.retries + 1):
            seconds = task.reset(luck.random())
            if seconds > task.hedge_after:
                seconds = min(seconds, task.hedge_after + task.reset(luck.random()))
            failed = luck.random() < task.workload.reset_failures
            await asyncio.sleep(min(seconds, config.reset_deadline))
            if not failed and seconds <= config.reset_deadline:
                return
        raise EnvironmentFailed("the modelled environment could not be reset")

    async def step(self, action: str) -> Step:
        pool, task, luck = self.pool, self.task, self.luck
        seconds = max(0.0, task.step(luck.random()))
        if task.workload.delay:
            seconds += max(0.0, task.delay(luck.random()))
        pool.stepping += 1
        try:
            await asyncio.sleep(min(seconds, pool.config.step_deadline))
        finally:
            pool.stepping -= 1
        failures = task.workload.step_failures
        if seconds > pool.config.step_deadline or (failures and luck.random() < failures):
            raise EnvironmentFailed("the modelled environment failed in a step")
        self.left -= 1
        if self.left <= 0:
            return _LAST
        return _said(max(1, round(task.observation(luck.random()))))


_LAST = Step((), 1.0, True)


@lru_cache(maxsize=1 << 16)
def _said(tokens: int) -> Step:
    """An observation of so many tokens. Nobody changes a step, so all of one length are one."""
    return Step((Message("user", str(tokens)),))


class ModelledEnvironments:
    """`slots` environments per task, as many as are in use, and what they are doing."""

    def __init__(self, scenario: Scenario) -> None:
        self.config = scenario.environments
        self.in_use = self.resetting = self.stepping = 0
        self.slots = scenario.environments.slots * len(scenario.tasks)
        self._tasks = {task.name: _Task(scenario.workload(task.name), self.config) for task in scenario.tasks}
        self._seen: OrderedDict[int, int] = OrderedDict()

    def occurrence(self, seed: int) -> int:
        """How often an episode of this seed was begun before."""
        count = self._seen.get(seed, 0)
        self._seen[seed] = count + 1
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return count

    @asynccontextmanager
    async def lease(self, task: str, held_out: bool) -> AsyncIterator[ModelledEnvironment]:
        of = self._tasks[task]
        async with of.slots:
            self.in_use += 1
            try:
                yield ModelledEnvironment(self, of)
            finally:
                self.in_use -= 1


class ModelledRenderer:
    """Observations are runs of zeros, an opening of its seed: what is equal stays equal."""

    stop: tuple[int, ...] = ()

    def open(self, messages: Sequence[Message]) -> list[int]:
        tokens, seed = messages[0].content.split()
        return cast(list[int], Runs.of(int(seed), int(tokens)))

    def extend(self, finish: Finish, messages: Sequence[Message]) -> list[int]:
        return cast(list[int], run_of(0, int(messages[0].content)))

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return True

    def text(self, tokens: Sequence[int]) -> str:
        return ""


class Answers:
    """How long the policy's answers are: drawn by the seed of the request."""

    def __init__(self, scenario: Scenario) -> None:
        self._draws: dict[str, Draw] = {
            task.name: draw_of(scenario.workload(task.name).response) for task in scenario.tasks
        }

    def __call__(self, request: Any) -> tuple[int, str]:
        sampling = request.sampling
        tokens = max(1, round(self._draws[request.task](sampling.seed / 0x7FFFFFFF)))
        return (sampling.max_tokens, "length") if tokens >= sampling.max_tokens else (tokens, "stop")
