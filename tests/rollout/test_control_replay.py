"""The control plane is a function of what it gets from outside: recorded in real time, it decides the same again.

Services are modelled, with failures, deadlines and an engine that is lost and comes back; the clock and the event loop
of the recording are real, so every recording is another one.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tape import CONTROL, Playback, PlayingLoop, RecordingLoop, Tape, controlled
from world import NEVER, StreamingModel

from benchmarks.modelled import ModelledEnvironments, ModelledRenderer, ModelledRewards, ModelledTrainer
from rollart.core.schedule import preset
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
    Sampling,
    Step,
    StepMetrics,
    TokenPart,
)
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.evaluation import Evaluator
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.training_loop import LoopPlan, TrainingLoop
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner

pytestmark = pytest.mark.slow  # in real time

AnyTape = Tape | Playback
LOST = "engine-1"


def about(mean: float, hang: float = 0.0) -> Callable[[random.Random], float]:
    """Seconds; some calls never return."""
    return lambda rng: rng.expovariate(1 / mean) if rng.random() >= hang else 3600.0


class Engine:
    """On a tape, like the services below. In a replay there is no `real` one."""

    def __init__(self, tape: AnyTape, name: str, real: Any) -> None:
        self._tape, self._name, self._real = tape, name, real

    async def generate(self, request: GenerationRequest) -> Completion:
        answer: Completion = await self._tape.call(f"generate {request.id}", lambda: self._real.generate(request))
        return answer

    async def generate_in_parts(
        self, request: GenerationRequest, every: int, on_part: Callable[[TokenPart], bool]
    ) -> Completion:
        name = f"{self._name} generates {request.id} after {request.resumed} of {len(request.tokens)} tokens"
        work = lambda record: self._real.generate_in_parts(request, every, record)  # noqa: E731
        answer: Completion = await self._tape.call_in_parts(name, work, on_part)
        return answer

    async def prefill(self, request: GenerationRequest) -> int:
        tokens: int = await self._tape.call(f"prefill {request.id}", lambda: self._real.prefill(request))
        return tokens

    async def abort(self, request_id: str) -> None: ...

    async def load(self, publication: Publication) -> LoadResult:
        name = f"{self._name} loads {publication.version}"
        loaded: LoadResult = await self._tape.call(name, lambda: self._real.load(publication))
        return loaded

    async def status(self) -> EngineStatus:
        status: EngineStatus = await self._real.status()
        return status


class Environment:
    def __init__(self, tape: AnyTape, real: Any) -> None:
        self._tape, self._real = tape, real

    async def reset(self, seed: int) -> tuple[Message, ...]:
        messages: tuple[Message, ...] = await self._tape.call(f"reset {seed}", lambda: self._real.reset(seed))
        return messages

    async def step(self, action: str) -> Step:
        step: Step = await self._tape.call(f"step {action}", lambda: self._real.step(action))
        return step


class Environments:
    def __init__(self, tape: AnyTape, real: Any) -> None:
        self._tape, self._real = tape, real

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator[Environment]:
        claim = self._real.claim(task, held_out) if self._real else None
        real = await self._tape.call(f"claim {task}", lambda: claim.__aenter__())
        try:
            yield Environment(self._tape, real)
        finally:
            await self._tape.call(f"release {task}", lambda: claim.__aexit__(None, None, None))


class Rewards:
    def __init__(self, tape: AnyTape, real: Any) -> None:
        self._tape, self._real = tape, real

    async def score(self, task: str, episode: Episode) -> RewardResult:
        result: RewardResult = await self._tape.call(f"score {episode.id}", lambda: self._real.score(task, episode))
        return result


class Trainer:
    def __init__(self, tape: AnyTape, real: Any) -> None:
        self._tape, self._real = tape, real

    async def step(self, batch: Batch) -> StepMetrics:
        members = [[sample.id for sample in group.samples] for group in batch.groups]
        metrics: StepMetrics = await self._tape.call(f"train {members}", lambda: self._real.step(batch))
        return metrics

    async def publish(self) -> Publication:
        publication: Publication = await self._tape.call("publish", lambda: self._real.publish())
        return publication

    async def save(self, path: Path) -> None:
        await self._tape.call(f"save {path}", lambda: self._real.save(path))

    async def saved(self) -> str:
        fault: str = await self._tape.call("saved", lambda: self._real.saved())
        return fault

    async def load(self, path: Path) -> None: ...


async def run(
    tape: AnyTape, name: str, steps: int, *, group_size: int = 4, hang: float = 0.0, deadline: float = 60.0
) -> None:
    """Train with a control plane whose services are modelled while it is recorded, and the tape afterwards."""
    rng, recording = random.Random(3), isinstance(tape, Tape)
    fleet = [StreamingModel(rng, about(0.01), about(0.005), failures=0.02) if recording else None for _ in range(4)]
    spare = Engine(tape, "engine-1 again", fleet.pop())
    clients = {f"engine-{number}": Engine(tape, f"engine-{number}", real) for number, real in enumerate(fleet)}
    registry = EngineRegistry(clients, 0, tape)
    environments = ModelledEnvironments(
        rng, 40, lambda rng: rng.randint(1, 9), about(0.005), about(0.002, hang), failures=0.03
    )
    schedule, ledger = preset(name, 1, 2.0, 1, 0), SqliteLedger.open(Path(":memory:"))
    tasks = [
        RolloutTask(task, weight, 6, 100_000, Sampling(max_tokens=8), deadline=deadline)
        for task, weight in (("a", 2.0), ("b", 1.0))
    ]
    runner = TrajectoryRunner(
        environments=Environments(tape, environments if recording else None),
        router=Router(registry),
        renderer=ModelledRenderer(),
        rewards=Rewards(tape, ModelledRewards(rng, about(0.002), 0.03)),
        sink=tape,
        lockstep=Lockstep() if schedule.lockstep else None,
    )
    scheduler = Scheduler(
        tasks=tasks,
        schedule=schedule,
        batch_groups=6,
        group_size=group_size,
        steps=steps,
        retries=50,
        runner=runner,
        ledger=ledger,
        sink=tape,
        quarantine=NEVER,
    )
    loop = TrainingLoop(
        plan=LoopPlan(steps, 2, 3, episodes=2),
        version=0,
        source=scheduler,
        trainer=Trainer(tape, ModelledTrainer(rng, about(0.02))),
        router=runner.router,
        evaluator=Evaluator(tasks, runner, ledger, tape),
        ledger=ledger,
        sink=tape,
        checkpoints=Path("checkpoints"),
        on_saved=lambda version: None,
    )
    inbound: dict[str, Callable[..., None]] = {
        "lost": lambda: registry.mark_lost(LOST, "an outage"),
        "back": lambda version: registry.add(LOST, spare, version),
    }

    async def outage(engine: StreamingModel, replacement: StreamingModel, tape: Tape) -> None:
        await asyncio.sleep(0.1)
        tape.external("lost")
        engine.lose()
        controlled(inbound["lost"])
        await asyncio.sleep(0.1)
        version = await registry.catch_up(replacement)
        tape.external("back", version)
        controlled(lambda: inbound["back"](version))

    failing: asyncio.Task[None] | None = None
    if isinstance(tape, Tape):
        engine, replacement = fleet[1], spare._real
        assert engine is not None
        failing = asyncio.create_task(outage(engine, replacement, tape))
        tape.tick(asyncio.get_running_loop().time())
    else:
        tape.inbound = inbound
    CONTROL.set(True)
    try:
        await loop.run()
        await scheduler.stop()
    finally:
        CONTROL.set(False)
        if failing is not None:
            failing.cancel()


def record(name: str, steps: int, **world: Any) -> Tape:
    tape = Tape()
    with asyncio.Runner(loop_factory=lambda: RecordingLoop(tape)) as runner:
        runner.run(run(tape, name, steps, **world))
    return tape


def replay(tape: Tape, name: str, steps: int, **world: Any) -> Playback:
    """Raises Differs."""
    playback = Playback(tape)
    loop = PlayingLoop(playback)
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(run(playback, name, steps, **world))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return playback


def same(playback: Playback, tape: Tape) -> bool:
    assert playback.difference == ""
    return playback.position == len(tape.decisions)


@pytest.mark.parametrize("name", ["sync", "sync_plus", "one_off", "start_bound", "rollart"])
def test_the_same_answers_in_the_same_order_give_the_same_decisions(name: str) -> None:
    tape = record(name, 6)
    assert {"clock", "answer", "part", "lost"} <= {item[1] for item in tape.items}
    assert same(replay(tape, name, 6), tape)


def test_episodes_that_exceed_their_deadline_do_so_again() -> None:
    world = {"hang": 0.12, "deadline": 1.5}
    tape = record("rollart", 2, **world)
    assert "timer" in {item[1] for item in tape.items}
    assert same(replay(tape, "rollart", 2, **world), tape)


def test_the_first_decision_that_differs_is_named() -> None:
    tape = record("rollart", 2)
    tape.decisions[7] = "another one"
    assert replay(tape, "rollart", 2).difference.startswith("decision 7: the run had another one, the replay ")
