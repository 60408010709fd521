"""Real player processes, on real sockets, with scripted engines and environments."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from world import Recorder

from benchmarks.controller_load import Load, Services, connect_engines, make_tokenizer, scripted
from rollart.core.events import AnyEvent, ServiceEnded, ServiceStarted, TrajectoryEnded, TrajectoryStarted, TurnDone
from rollart.core.schedule import Schedule
from rollart.core.types import Outcome
from rollart.fleet.controller import rollout_tasks
from rollart.fleet.supervision import background
from rollart.launch.local import LocalLauncher
from rollart.models.chat import ChatRenderer
from rollart.players.pool import PlayerPool, PlayerSetup
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.workers.host import KEY

pytestmark = pytest.mark.slow
LOAD = Load(trajectories=16, turns=4, prompt=60, observation=20, answer=40, delay=0.01)


class World:
    """A scheduler whose trajectories are played by two players."""

    def __init__(self, players: PlayerPool, registry: EngineRegistry, sink: Recorder, scheduler: Scheduler) -> None:
        self.players, self.registry, self.sink, self.scheduler = players, registry, sink, scheduler

    @property
    def reserved(self) -> int:
        return sum(engine.reserved + engine.open for pool in self.registry.pools for engine in pool.engines)


@asynccontextmanager
async def world(folder: Path, monkeypatch: pytest.MonkeyPatch, sink: Recorder) -> AsyncIterator[World]:
    monkeypatch.setenv(KEY, "load")
    tokenizer = make_tokenizer(folder / "tokenizer")
    end = ChatRenderer(tokenizer).stop[0]
    spec = {"key": "load", "seed": 0, "end": end, "bind": "", "turns": 4, "prompt": 60, "observation": 20}
    spec |= {"answer": 40, "delay": 0.01}
    async with AsyncExitStack() as stack:
        urls = [stack.enter_context(scripted(kind, spec)) for kind in ("engines", "environments")]
        services = Services(urls[0], urls[1], "load", tokenizer)
        run = services.run_file(LOAD, players=2)
        registry = EngineRegistry(await connect_engines(stack, services, 3), sink=sink)
        setup = PlayerSetup(run, 2, tokenizer, folder)
        players = PlayerPool(setup, launcher=LocalLauncher(), router=Router(registry), sink=sink)
        stack.push_async_callback(players.close)
        await players.start()
        scheduler = Scheduler(
            tasks=rollout_tasks(run),
            schedule=Schedule(alpha=0, window=1.0),
            batch_groups=4,
            group_size=4,
            steps=1,
            runner=players,
            engines=registry,
            ledger=SqliteLedger.open(folder / "ledger.sqlite"),
            sink=sink,
        )
        yield World(players, registry, sink, scheduler)


class WaitedFor(Recorder):
    """Events, and waiting until some were emitted."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def emit(self, event: AnyEvent) -> None:
        super().emit(event)
        self._changed.set()

    async def until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    def starts(self, name: str) -> list[int]:
        return [event.pid for event in self.of(ServiceStarted) if event.name == name]


def test_trajectories_of_a_killed_player_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = WaitedFor()

    async def main() -> None:
        async with world(tmp_path, monkeypatch, sink) as made, background(made.players.watch()):
            made.scheduler.admit()
            async with asyncio.timeout(120):
                await sink.until(lambda: len(sink.of(TurnDone)) >= 10)
                assert b"tcache_count" in Path(f"/proc/{sink.starts('player-1')[0]}/environ").read_bytes()
                os.kill(sink.starts("player-1")[0], signal.SIGKILL)
                batch = await made.scheduler.take_batch()
                await sink.until(lambda: len(sink.starts("player-1")) == 2)
            assert sum(len(group.samples) for group in batch.groups) == 16
            await made.scheduler.stop()
            assert made.reserved == 0
            assert made.scheduler.running == 0

    asyncio.run(main())
    assert [event.name for event in sink.of(ServiceEnded)] == ["player-1"]
    started = [event.trajectory for event in sink.of(TrajectoryStarted)]
    ended = {event.trajectory: event for event in sink.of(TrajectoryEnded)}
    assert sorted(started) == sorted(ended)
    lost = [event for event in ended.values() if event.outcome is Outcome.ENGINE_FAILED]
    assert lost
    assert all("player-1 was lost" in event.reason for event in lost)
    assert sum(event.outcome is Outcome.FINISHED for event in ended.values()) == 16


def test_a_stopped_scheduler_cancels_what_players_play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their turns so far are in the ledger, and nothing stays reserved at an engine."""
    sink = WaitedFor()

    async def main() -> None:
        async with world(tmp_path, monkeypatch, sink) as made, background(made.players.watch()):
            made.scheduler.admit()
            async with asyncio.timeout(120):
                await sink.until(lambda: len(sink.of(TurnDone)) >= 10)
                await made.scheduler.stop()
            assert made.reserved == 0
            assert not sink.of(ServiceEnded)

    asyncio.run(main())
    outcomes = {event.outcome for event in sink.of(TrajectoryEnded)}
    assert len(sink.of(TrajectoryEnded)) == 16
    assert Outcome.CANCELLED in outcomes and outcomes <= {Outcome.CANCELLED, Outcome.FINISHED}
    ledger = SqliteLedger.open_readonly(tmp_path / "ledger.sqlite")
    kept = sum(len(trajectory.turns) for trajectory in ledger.trajectories())
    assert kept == len(sink.of(TurnDone))
