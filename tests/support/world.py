"""A whole control plane on modelled services, for tests on virtual time."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.modelled import (
    ModelledEngine,
    ModelledEnvironment,
    ModelledEnvironments,
    ModelledRenderer,
    ModelledRewards,
    ModelledTrainer,
)
from rollart.core.errors import EngineFailed, EngineLost, EnvironmentFailed
from rollart.core.events import AnyEvent
from rollart.core.schedule import QuarantineRule, Schedule
from rollart.core.types import Completion, GenerationRequest, Message, Sampling, TokenPart
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.evaluation import Evaluator
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.training_loop import LoopPlan, TrainingLoop
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner

NEVER = QuarantineRule(rate=2.0, groups=10**9)  # no task is ever left out


@dataclass
class Recorder:
    events: list[AnyEvent] = field(default_factory=list)

    def emit(self, event: AnyEvent) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class BrokenEnvironment(ModelledEnvironment):
    async def reset(self, seed: int) -> tuple[Message, ...]:
        await asyncio.sleep(0.1)
        raise EnvironmentFailed("the environment is broken for now")


@dataclass
class BreakingEnvironments:
    """Environments of each task in `broken` fail between two times."""

    pool: ModelledEnvironments
    broken: dict[str, tuple[float, float]]

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator[ModelledEnvironment]:
        async with self.pool.claim(task, held_out) as environment:
            begin, end = self.broken.get(task, (0.0, 0.0))
            works = not begin <= asyncio.get_running_loop().time() < end
            yield environment if works else BrokenEnvironment(self.pool)


@dataclass(slots=True)
class StreamingModel(ModelledEngine):
    """Streams its tokens one by one. When it is lost, its requests fail at once."""

    gone: bool = False
    waiting: set[asyncio.Future[None]] = field(default_factory=set)

    def lose(self) -> None:
        self.gone = True
        for future in self.waiting:
            if not future.done():
                future.set_exception(EngineLost("the engine is gone"))

    async def generate_in_parts(
        self, request: GenerationRequest, every: int, on_part: Callable[[TokenPart], bool]
    ) -> Completion:
        self.running += 1
        tokens, versions = min(self.tokens - request.resumed, request.sampling.max_tokens), list[int]()
        seconds = self.seconds(self.rng)
        try:
            for number in range(tokens):
                await self._pass(seconds / self.tokens)
                versions.append(self.version)
                if number + 1 < tokens:
                    on_part(TokenPart([1], [-1.0], [self.version]))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        if self.rng.random() < self.failures:
            raise EngineFailed("the modelled engine failed")
        return Completion([1] * tokens, [-1.0] * tokens, versions, "stop", prompt=len(request.tokens))

    async def _pass(self, seconds: float) -> None:
        if self.gone:
            raise EngineLost("the engine is gone")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.waiting.add(future)
        timer = loop.call_later(seconds, lambda: future.done() or future.set_result(None))
        try:
            await future
        finally:
            timer.cancel()
            self.waiting.discard(future)


@dataclass
class World:
    engines: dict[str, StreamingModel]
    environments: ModelledEnvironments
    rewards: ModelledRewards
    trainer: ModelledTrainer
    recorder: Recorder
    ledger: SqliteLedger
    router: Router
    scheduler: Scheduler
    evaluator: Evaluator
    pipeline: TrainingLoop
    rng: random.Random
    base: int

    async def outage(self, name: str, at: float, delay: float) -> None:
        """An engine dies, and is restarted later as the fleet does it: at the first version, then up to date."""
        await asyncio.sleep(at)
        registry = self.router.engines
        self.engines[name].lose()
        registry.mark_lost(name, "an outage")
        await asyncio.sleep(delay)
        engine = StreamingModel(self.rng, version=self.base)
        version = await registry.catch_up(engine)
        self.engines[f"{name} again"] = engine
        registry.add(name, engine, version)


def build(
    schedule: Schedule,
    ledger: SqliteLedger,
    *,
    weights: dict[str, float] | None = None,
    batch_groups: int = 4,
    group_size: int = 2,
    steps: int = 6,
    retries: int = 50,
    seed: int = 0,
    engines: int = 2,
    evaluate_every: int = 0,
    checkpoint_every: int = 2,
    max_turns: int = 50,
    deadline: float = 1000.0,
    reward: str = "",
    environments: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    rewards: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    rule: QuarantineRule = NEVER,
    broken: dict[str, tuple[float, float]] | None = None,
    own: dict[str, dict[str, Any]] | None = None,
) -> World:
    """`own` has what is different for a task."""
    rng = random.Random(seed)
    recorder = Recorder()
    recovery = ledger.recover()
    fleet = {f"engine-{n}": StreamingModel(rng, version=recovery.version, **(engine or {})) for n in range(engines)}
    router = Router(EngineRegistry(fleet, recovery.version, recorder))
    pool = ModelledEnvironments(rng, **(environments or {}))
    invoker = ModelledRewards(rng, **(rewards or {}))
    model = ModelledTrainer(rng, version=recovery.version, **(trainer or {}))
    tasks = [
        RolloutTask(name, weight, max_turns, 100_000, Sampling(max_tokens=8), deadline=deadline, reward=reward)
        for name, weight in (weights or {"a": 1.0, "b": 1.0}).items()
    ]
    tasks = [replace(task, **(own or {}).get(task.name, {})) for task in tasks]
    runner = TrajectoryRunner(
        environments=BreakingEnvironments(pool, broken or {}),
        router=router,
        renderer=ModelledRenderer(),
        rewards=invoker,
        sink=recorder,
        lockstep=Lockstep() if schedule.lockstep else None,
    )
    scheduler = Scheduler(
        tasks=tasks,
        schedule=schedule,
        batch_groups=batch_groups,
        group_size=group_size,
        steps=steps,
        retries=retries,
        seed=seed,
        runner=runner,
        engines=router.engines,
        ledger=ledger,
        sink=recorder,
        quarantine=rule,
    )
    scheduler.recover(recovery)
    evaluator = Evaluator(tasks, replace(runner, lockstep=None), ledger, recorder)
    pipeline = TrainingLoop(
        plan=LoopPlan(steps, checkpoint_every, evaluate_every, episodes=4),
        version=recovery.version,
        source=scheduler,
        trainer=model,
        engines=router.engines,
        evaluator=evaluator,
        ledger=ledger,
        sink=recorder,
        checkpoints=Path("checkpoints"),
        on_saved=lambda version: None,
    )
    return World(
        fleet, pool, invoker, model, recorder, ledger, router, scheduler, evaluator, pipeline, rng, recovery.version
    )
