"""Simulated environments and their renderer; the content of a message is the number of its tokens.

The random numbers of a trajectory depend only on the seed of its group and on how many members started before it, so
they are the same under every schedule. A first message also has its seed.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, cast

from rollart.config import EnvironmentsConfig
from rollart.core.action import ParsedAction
from rollart.core.errors import EnvironmentFailed
from rollart.core.run_length import RunLength, run_of
from rollart.core.seeds import seed_of
from rollart.core.types import Finish, GenerationRequest, Message, Step
from rollart.simulator.distributions import draw_of
from rollart.simulator.prefix_cache import prompt_of
from rollart.simulator.scenario import Scenario, Workload

_MAX_SEEDS = 200_000  # of groups that may still get another member
_UNSEEDED = random.Random(0)  # before the first reset; shared, as generators are large


class _Task:
    """The draws of one task, and a semaphore for its processes."""

    def __init__(self, workload: Workload, config: EnvironmentsConfig) -> None:
        self.turns, self.prompt = draw_of(workload.turns), draw_of(workload.prompt)
        self.observation, self.reset = draw_of(workload.observation), draw_of(workload.reset)
        self.step, self.delay = draw_of(workload.step), draw_of(workload.delay)
        self.workload, self.free = workload, asyncio.Semaphore(config.processes)
        self.hedge_after = self.reset(config.hedge_after) if config.hedges else float("inf")


@dataclass(slots=True)
class SimulatedEnvironment:
    """Leased for as long as it is entered."""

    pool: "SimulatedEnvironments"
    task: _Task
    rng: random.Random = _UNSEEDED
    left: int = 0

    async def __aenter__(self) -> Self:
        await self.task.free.acquire()
        self.pool.in_use += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.pool.in_use -= 1
        self.task.free.release()

    async def reset(self, seed: int) -> tuple[Message, ...]:
        pool, task = self.pool, self.task
        self.rng = rng = random.Random(seed_of(seed, pool.occurrence(seed)))
        self.left = max(1, round(task.turns(rng.random())))
        pool.resetting += 1
        try:
            await self._reset(rng)
        finally:
            pool.resetting -= 1
        tokens = max(1, round(task.prompt(seed / 0x7FFFFFFF)))
        return (Message("user", f"{tokens} {seed}"),)

    async def _reset(self, rng: random.Random) -> None:
        """Retried when it fails or takes too long; hedged by a second reset when it is slow."""
        config, task = self.pool.config, self.task
        for _ in range(config.retries + 1):
            seconds = task.reset(rng.random())
            if seconds > task.hedge_after:
                seconds = min(seconds, task.hedge_after + task.reset(rng.random()))
            failed = rng.random() < task.workload.reset_failures
            await asyncio.sleep(min(seconds, config.reset_deadline))
            if not failed and seconds <= config.reset_deadline:
                return
        raise EnvironmentFailed("the simulated environment could not be reset")

    async def step(self, action: str) -> Step:
        pool, task, rng = self.pool, self.task, self.rng
        seconds = max(0.0, task.step(rng.random()))
        if task.workload.delay:
            seconds += max(0.0, task.delay(rng.random()))
        pool.stepping += 1
        try:
            await asyncio.sleep(min(seconds, pool.config.step_deadline))
        finally:
            pool.stepping -= 1
        failures = task.workload.step_failures
        if seconds > pool.config.step_deadline or (failures and rng.random() < failures):
            raise EnvironmentFailed("the simulated environment failed in a step")
        self.left -= 1
        if self.left <= 0:
            return _LAST
        return _observation(max(1, round(task.observation(rng.random()))))


_LAST = Step((), 1.0, True)


@lru_cache(maxsize=1 << 16)
def _observation(tokens: int) -> Step:
    """An observation of `tokens` tokens; steps are immutable, so equal ones are shared."""
    return Step((Message("user", str(tokens)),))


class SimulatedEnvironments:
    """`environments.processes` environments per task; counts those in use and what they do."""

    def __init__(self, scenario: Scenario) -> None:
        self.config = scenario.environments
        self.in_use = self.resetting = self.stepping = 0
        self.capacity = scenario.environments.processes * len(scenario.tasks)
        self._tasks = {task.name: _Task(scenario.workload(task.name), self.config) for task in scenario.tasks}
        self._seen: OrderedDict[int, int] = OrderedDict()

    def occurrence(self, seed: int) -> int:
        """How many episodes of this seed began before."""
        count = self._seen.get(seed, 0)
        self._seen[seed] = count + 1
        if len(self._seen) > _MAX_SEEDS:
            self._seen.popitem(last=False)
        return count

    def claim(self, task: str, held_out: bool) -> AbstractAsyncContextManager[SimulatedEnvironment]:
        return SimulatedEnvironment(self, self._tasks[task])


class SimulatedRenderer:
    """Observations are runs of zeros, prompts are runs of their seed, so that equal prompts are equal tokens."""

    stop: tuple[int, ...] = ()

    def open(self, messages: Sequence[Message]) -> list[int]:
        tokens, seed = messages[0].content.split()
        return cast(list[int], RunLength.of(int(seed), int(tokens)))

    def extend(self, last: int, messages: Sequence[Message]) -> list[int]:
        return cast(list[int], run_of(0, int(messages[0].content)))

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return True

    def read(self, prompt: Sequence[int], tokens: Sequence[int], opening: Sequence[Message]) -> ParsedAction:
        return ParsedAction("")


class RequestLengths:
    """The lengths of contexts, and of the policy's responses, which are drawn by the seed of the request."""

    def __init__(self, scenario: Scenario) -> None:
        workloads = {task.name: scenario.workload(task.name) for task in scenario.tasks}
        self._draws = {name: draw_of(workload.response) for name, workload in workloads.items()}
        self._windows = {name: workload.window for name, workload in workloads.items()}

    def context(self, request: GenerationRequest) -> int:
        window, whole = self._windows[request.task], len(request.tokens)
        return whole if window is None else min(whole, prompt_of(request) + round(window))

    def __call__(self, request: GenerationRequest) -> tuple[int, Finish]:
        sampling = request.sampling
        assert sampling.seed is not None
        tokens = max(1, round(self._draws[request.task](sampling.seed / 0x7FFFFFFF)))
        return (sampling.max_tokens, "length") if tokens >= sampling.max_tokens else (tokens, "stop")
