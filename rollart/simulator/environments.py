"""Simulated environments and their renderer; the content of a message is the number of its tokens.

The random numbers of a trajectory depend only on the seed of its group and on how many members started before it, so
they are the same under every schedule. A first message also has its seed.

Where a part stands for a fleet (`simulate.one_in`), turns and lengths of answers are drawn evenly, in the order in
which they are asked for: of few, the longest would differ by chance from batch to batch, and be too short.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Self, cast

from rollart.core.action import ParsedAction
from rollart.core.errors import EnvironmentFailed
from rollart.core.run_length import RunLength, run_of
from rollart.core.seeds import seed_of
from rollart.core.types import Finish, GenerationRequest, Message, Step
from rollart.simulator.distributions import draw_of, mean_of
from rollart.simulator.scenario import Scenario

_MAX_SEEDS = 200_000  # of groups that may still get another member
_UNSEEDED = random.Random(0)  # before the first reset; shared, as generators are large
_GOLDEN = (5**0.5 - 1) / 2


def even_numbers(start: float, per_batch: float, one_in: int) -> Callable[[], float]:
    """Numbers in 0..1 that are spread evenly over any stretch of them (multiples of the golden ratio). About one of
    `per_batch` is in the uppermost slice of that width, and is as large as the largest of the `one_in` that the whole
    fleet has there: batches wait for these."""
    at, width = start, 1.0 / max(1.0, per_batch)

    def draw() -> float:
        nonlocal at
        at = (at + _GOLDEN) % 1.0
        inside = 1.0 - (1.0 - at) / width
        return at if inside <= 0.0 else 1.0 - width * (1.0 - inside ** (1.0 / one_in))

    return draw


def _trajectories(scenario: Scenario, task: str) -> float:
    """Of a task in a batch, on the average."""
    groups = {each.name: each.weight for each in scenario.tasks}
    return scenario.training.batch_groups * scenario.training.group_size * groups[task] / sum(groups.values())


def _even(scenario: Scenario, what: str, task: str, per_trajectory: float) -> Callable[[], float] | None:
    """Even numbers for `what` of a task, if a part stands for the fleet."""
    if (one_in := scenario.simulate.one_in) == 1:
        return None
    start = seed_of(what, task, scenario.seed) / 0x7FFFFFFF
    return even_numbers(start, per_trajectory * _trajectories(scenario, task), one_in)


class _Task:
    """The draws of one task, and a semaphore for its processes."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        workload, config = scenario.workload(name), scenario.environments
        self.even = _even(scenario, "turns", name, 1.0)
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
        turns = rng.random()
        self.left = max(1, round(task.turns(turns if task.even is None else task.even())))
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
        self._tasks = {task.name: _Task(scenario, task.name) for task in scenario.tasks}
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


class ResponseLengths:
    """The lengths of the policy's responses, drawn by the seed of the request."""

    def __init__(self, scenario: Scenario) -> None:
        self._draws = {task.name: draw_of(scenario.workload(task.name).response) for task in scenario.tasks}
        turns = {task.name: max(1.0, mean_of(scenario.workload(task.name).turns)) for task in scenario.tasks}
        even = {name: _even(scenario, "response", name, mean) for name, mean in turns.items()}
        self._even = {name: draw for name, draw in even.items() if draw is not None}

    def __call__(self, request: GenerationRequest) -> tuple[int, Finish]:
        sampling = request.sampling
        assert sampling.seed is not None
        at = self._even[request.task]() if self._even else sampling.seed / 0x7FFFFFFF
        tokens = max(1, round(self._draws[request.task](at)))
        return (sampling.max_tokens, "length") if tokens >= sampling.max_tokens else (tokens, "stop")
