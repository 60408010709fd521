"""The control plane is a function of what it gets from outside: recorded in real time, it decides the same again.

Services are modelled, with failures, deadlines and an engine that is lost and comes back; the clock and the event loop
of a recording are real, so every recording is another one. `tests/replays` has tapes of real runs.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from world import NEVER, Recorder, StreamingModel

from benchmarks.modelled import ModelledEnvironments, ModelledRenderer, ModelledRewards, ModelledTrainer
from rollart.core.errors import RollartError
from rollart.core.event_log import EventReader, LineLog
from rollart.core.protocols import Generate, TokenStream
from rollart.core.schedule import preset
from rollart.core.types import CaptureCounts, CapturedEpisode, GenerationRequest, Sampling, Step, Turn
from rollart.fleet.control_engines import RecordedRegistry, TapedEngine, inbound_calls
from rollart.fleet.control_playback import Playback, PlayingLoop
from rollart.fleet.control_replay import play, replay_control
from rollart.fleet.control_services import TapedAgents, TapedEnvironments, TapedRenderer, TapedRewards, TapedTrainer
from rollart.fleet.control_tape import RecordingLoop, Tape
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EnginePool
from rollart.rollout.evaluation import Evaluator
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.lockstep import Lockstep
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.training_loop import LoopPlan, TrainingLoop
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner

REPLAYS = Path(__file__).parents[1] / "replays"
AnyTape = Tape | Playback
LOST = "engine-1"


def about(mean: float, hang: float = 0.0) -> Callable[[random.Random], float]:
    """Seconds; some calls never return."""
    return lambda rng: rng.expovariate(1 / mean) if rng.random() >= hang else 3600.0


@dataclass
class World:
    name: str = "rollart"
    steps: int = 6
    hang: float = 0.0
    deadline: float = 60.0
    agents: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(3))


class ModelledAgents:
    """Programs that send two requests, the second of which they end early."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    @asynccontextmanager
    async def claim(self, task: str) -> AsyncIterator["ModelledAgents"]:
        yield self

    async def play(
        self, id: str, seed: int, held_out: bool, generate: Generate, captured: Callable[[CapturedEpisode], None]
    ) -> Step:
        turns = []
        for turn in range(2):
            await asyncio.sleep(self._rng.expovariate(500))
            stream = TokenStream(1, lambda tokens: self._rng.random() < 0.5) if turn else None
            request = GenerationRequest(f"{id}/{turn}", id, "a", turn, [turn, seed % 7], Sampling(max_tokens=8))
            made = await generate(request, stream)
            tokens, logprobs, versions = tuple(made.tokens), tuple(made.logprobs), tuple(made.versions)
            turns.append(Turn((), (turn,), "x", tokens, logprobs, versions, "stop"))
        captured(CapturedEpisode(tuple(turns), CaptureCounts(requests=2)))
        return Step((), self._rng.random(), done=True)


async def train(tape: AnyTape, registry: EngineRegistry, world: World) -> None:
    """A control plane; its services are modelled while it is recorded, and the tape afterwards."""
    rng, real = world.rng, isinstance(tape, Tape)
    environments = ModelledEnvironments(
        rng, 40, lambda rng: rng.randint(1, 9), about(0.005), about(0.002, world.hang), failures=0.03
    )
    schedule, ledger = preset(world.name, 1, 2.0, 1, 0), SqliteLedger.open(Path(":memory:"))
    sink = tape.sink(Recorder()) if isinstance(tape, Tape) else tape
    tasks = [
        RolloutTask(
            task,
            weight,
            6,
            100_000,
            Sampling(max_tokens=8),
            deadline=world.deadline,
            agent=world.agents and task == "a",
        )
        for task, weight in (("a", 2.0), ("b", 1.0))
    ]
    runner = TrajectoryRunner(
        environments=TapedEnvironments(tape, environments if real else None),
        router=Router(registry),
        renderer=TapedRenderer(tape, ModelledRenderer() if real else None, ModelledRenderer.stop),
        rewards=TapedRewards(tape, ModelledRewards(rng, about(0.002), 0.03)),
        agents=TapedAgents(tape, ModelledAgents(rng) if real else None),
        sink=sink,
        lockstep=Lockstep() if schedule.lockstep else None,
    )
    scheduler = Scheduler(
        tasks=tasks,
        schedule=schedule,
        batch_groups=6,
        group_size=4,
        steps=world.steps,
        retries=50,
        runner=runner,
        engines=registry,
        ledger=ledger,
        sink=sink,
        quarantine=NEVER,
    )
    modelled = ModelledTrainer(rng, about(0.02))
    loop = TrainingLoop(
        plan=LoopPlan(world.steps, 2, 3, episodes=2),
        version=0,
        source=scheduler,
        trainer=TapedTrainer(tape, lambda: modelled),
        engines=registry,
        evaluator=Evaluator(tasks, runner, ledger, sink),
        ledger=ledger,
        sink=sink,
        checkpoints=Path("checkpoints"),
        on_saved=lambda version: None,
    )
    try:
        await loop.run()
    finally:
        await scheduler.stop()


async def record_run(path: Path, world: World, stop: bool) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, RecordingLoop)
    loop.tape = tape = Tape(path)
    registry = RecordedRegistry(tape, version=0, sink=Recorder(), on_lost=lambda name: None)
    fleet = [StreamingModel(world.rng, about(0.01), about(0.005), failures=0.02) for _ in range(4)]
    pool, spare = EnginePool("engine"), fleet.pop()
    for number, engine in enumerate(fleet):
        registry.add(f"engine-{number}", engine, 0, pool)

    async def outage() -> None:
        await asyncio.sleep(0.1)
        fleet[1].lose()
        registry.mark_lost(LOST, "an outage")
        await asyncio.sleep(0.1)
        registry.add(LOST, spare, await registry.catch_up(spare), pool)

    failing = asyncio.create_task(outage())
    tape.external("start")
    running = asyncio.create_task(tape.run(lambda: train(tape, registry, world), "stop"))
    try:
        if stop:
            await failing
            running.cancel()
        await asyncio.wait([running])
    finally:
        failing.cancel()
        tape.external("end")
        loop.tape = None
        tape.close()
    if not stop:
        running.result()


def record(path: Path, world: World, stop: bool = False) -> list[bytes]:
    with asyncio.Runner(loop_factory=RecordingLoop) as runner:
        runner.run(record_run(path, world, stop))
    return list(EventReader(path).lines())


def replayed(lines: Sequence[bytes], world: World) -> Playback:
    playback = Playback(iter(lines))
    registry = EngineRegistry(sink=playback)
    tasks: list[asyncio.Task[None]] = []
    inbound: dict[str, Any] = inbound_calls(registry, lambda name, url: TapedEngine(playback, name, None, url))
    loop = PlayingLoop(playback, inbound)
    inbound["start"] = (), lambda: tasks.append(loop.create_task(train(playback, registry, world)))
    inbound["stop"] = (), lambda: tasks[0].cancel()
    asyncio.set_event_loop(loop)
    try:
        loop.play()
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return playback


def same(playback: Playback) -> bool:
    assert playback.difference == ""
    return playback.compared == len(playback.decided) > 100


def kinds(playback: Playback) -> set[str]:
    return {kind for _, kind, _ in playback.items}


@pytest.mark.slow  # in real time
@pytest.mark.parametrize("name", ["sync", "sync_plus", "one_off", "start_bound", "rollart"])
def test_the_same_answers_in_the_same_order_give_the_same_decisions(name: str, tmp_path: Path) -> None:
    world = World(name)
    playback = replayed(record(tmp_path / "tape", world), world)
    assert {"clock", "answer", "raised", "part", "mark_lost", "add", "end"} <= kinds(playback)
    assert same(playback)


@pytest.mark.slow
def test_episodes_that_exceed_their_deadline_do_so_again(tmp_path: Path) -> None:
    world = World(steps=2, hang=0.12, deadline=1.5)
    playback = replayed(record(tmp_path / "tape", world), world)
    assert "timer" in kinds(playback)
    assert same(playback)


@pytest.mark.slow
def test_requests_of_agents_come_in_the_same_order_again(tmp_path: Path) -> None:
    world = World(agents=True)
    playback = replayed(record(tmp_path / "tape", world), world)
    assert {"ask", "notify", "value"} <= kinds(playback)
    assert same(playback)


@pytest.mark.slow
def test_a_run_that_is_stopped_stops_the_same_way_again(tmp_path: Path) -> None:
    world = World(steps=10_000)
    playback = replayed(record(tmp_path / "tape", world, stop=True), world)
    assert "stop" in kinds(playback)
    assert same(playback)


@pytest.mark.slow
def test_the_first_decision_that_differs_is_named_and_a_cut_tape_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    world = World(steps=2)
    lines = record(tmp_path / "tape", world)
    cut = replayed(lines[: len(lines) // 2], world)
    assert same(cut)
    assert not cut.whole
    seventh = [number for number, line in enumerate(lines) if not line.startswith(b"[")][7]
    changed = replayed([*lines[:seventh], b'"another one"', *lines[seventh + 1 :]], world)
    assert changed.difference.startswith('decision 7: the run had "another one", the replay ')
    last = max(number for number, line in enumerate(lines) if not line.startswith(b"["))
    more = replayed([*lines[:last], lines[last], b'"one more"', *lines[last + 1 :]], world)
    assert 'the run had "one more", the replay none' in more.difference


@pytest.mark.parametrize("run", sorted(path.name for path in REPLAYS.iterdir() if path.is_dir()))
def test_recorded_runs_decide_the_same_again(run: str) -> None:
    """A change of the control plane that is meant changes these: `tests/replays/README.md` says how to record again."""
    result = replay_control(REPLAYS / run)
    assert result.difference == ""
    assert result.decisions > 100


def test_what_is_no_tape_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RollartError, match=r"has no tape of its control plane; record one with"):
        replay_control(tmp_path)
    with pytest.raises(RollartError, match="is not a tape"):
        play(tmp_path / "001")
    log = LineLog(tmp_path / "002")
    log.append(b'{"format":1}')
    log.close()
    with pytest.raises(RollartError, match=r"cannot be replayed by this version of rollart: .*run"):
        play(tmp_path / "002")
