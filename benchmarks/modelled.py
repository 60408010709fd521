"""Modelled services: the protocols of the data plane, with time and chance in place of hardware."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollart.core.action import ParsedAction
from rollart.core.errors import EngineFailed, EnvironmentFailed, RewardFailed
from rollart.core.types import (
    Batch,
    Completion,
    EngineStatus,
    Episode,
    GenerationRequest,
    LoadResult,
    Message,
    Publication,
    RewardResult,
    Step,
    StepMetrics,
)

Seconds = Callable[[random.Random], float]


@dataclass(slots=True)
class ModelledEngine:
    """`tokens` tokens a request, in `seconds`; a swap in mid-request gives the rest of the tokens the new version."""

    rng: random.Random
    seconds: Seconds = lambda rng: 0.1
    load_seconds: Seconds = lambda rng: 0.05
    tokens: int = 4
    failures: float = 0.0
    version: int = 0
    running: int = 0
    aborted: int = 0

    async def generate(self, request: GenerationRequest) -> Completion:
        self.running += 1
        before = self.version
        try:
            await asyncio.sleep(self.seconds(self.rng))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        if self.rng.random() < self.failures:
            raise EngineFailed("the modelled engine failed")
        half = self.tokens // 2
        versions = [before] * half + [self.version] * (self.tokens - half)
        return Completion([1] * self.tokens, [-1.0] * self.tokens, versions, "stop", prompt=len(request.tokens))

    async def prefill(self, request: GenerationRequest) -> int:
        await asyncio.sleep(self.seconds(self.rng))
        if self.rng.random() < self.failures:
            raise EngineFailed("the modelled engine failed")
        return len(request.tokens) - 1

    async def abort(self, request_id: str) -> None:
        self.aborted += 1

    async def load(self, publication: Publication) -> LoadResult:
        await asyncio.sleep(self.load_seconds(self.rng))
        self.version = publication.version
        return LoadResult(self.version)

    async def status(self) -> EngineStatus:
        return EngineStatus(self.version, self.running, 0, 0, 0, 0, 0, 0, 0.0)


@dataclass(slots=True)
class ModelledEnvironment:
    pool: "ModelledEnvironments"
    left: int = 0

    async def reset(self, seed: int) -> tuple[Message, ...]:
        rng = self.pool.rng
        await asyncio.sleep(self.pool.reset_seconds(rng))
        if rng.random() < self.pool.failures:
            raise EnvironmentFailed("the modelled environment failed to reset")
        self.left = self.pool.turns(rng)
        return (Message("user", "begin"),)

    async def step(self, action: str) -> Step:
        rng = self.pool.rng
        await asyncio.sleep(self.pool.step_seconds(rng))
        if rng.random() < self.pool.failures:
            raise EnvironmentFailed("the modelled environment failed to step")
        self.left -= 1
        return Step((Message("user", "go on"),), 1.0 if self.left <= 0 else 0.0, self.left <= 0)


@dataclass(slots=True)
class ModelledEnvironments:
    """`processes` environments, shared by all tasks; `in_use` never exceeds them."""

    rng: random.Random
    processes: int = 1_000_000
    turns: Callable[[random.Random], int] = lambda rng: 3
    reset_seconds: Seconds = lambda rng: 0.1
    step_seconds: Seconds = lambda rng: 0.05
    failures: float = 0.0
    in_use: int = 0
    _gate: asyncio.Semaphore | None = None

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator[ModelledEnvironment]:
        self._gate = self._gate or asyncio.Semaphore(self.processes)
        async with self._gate:
            self.in_use += 1
            try:
                yield ModelledEnvironment(self)
            finally:
                self.in_use -= 1


@dataclass(slots=True)
class ModelledRewards:
    rng: random.Random
    seconds: Seconds = lambda rng: 0.02
    failures: float = 0.0
    value: Callable[[random.Random], float] = lambda rng: rng.random()

    async def score(self, task: str, episode: Episode) -> RewardResult:
        await asyncio.sleep(self.seconds(self.rng))
        if self.rng.random() < self.failures:
            raise RewardFailed("the modelled reward failed")
        return RewardResult(self.value(self.rng))


@dataclass(slots=True)
class ModelledRenderer:
    """Three tokens for every observation."""

    stop: tuple[int, ...] = (0,)

    def open(self, messages: Sequence[Message]) -> list[int]:
        return [2, 3, 4]

    def extend(self, last: int, messages: Sequence[Message]) -> list[int]:
        return [2, 3, 4]

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return True

    def read(self, prompt: Sequence[int], tokens: Sequence[int], opening: Sequence[Message]) -> ParsedAction:
        return ParsedAction("act")


@dataclass(slots=True)
class ModelledTrainer:
    rng: random.Random
    seconds: Seconds = lambda rng: 1.0
    version: int = 0
    kept: int = 0
    writing: Seconds = lambda rng: 0.0
    faults: dict[int, str] = field(default_factory=dict)  # why checkpoints of these versions cannot be written
    batches: list[Batch] = field(default_factory=list)

    async def step(self, batch: Batch) -> StepMetrics:
        self.batches.append(batch)
        seconds = self.seconds(self.rng)
        await asyncio.sleep(seconds)
        self.version = batch.step + 1
        tokens = sum(len(sample.tokens) for group in batch.groups for sample in group.samples)
        return StepMetrics(self.version, seconds, tokens)

    async def publish(self) -> Publication:
        return Publication(self.version)

    async def save(self, path: Path) -> None:
        self.kept = self.version

    async def saved(self) -> str:
        version = self.kept
        await asyncio.sleep(self.writing(self.rng))
        return self.faults.get(version, "")
