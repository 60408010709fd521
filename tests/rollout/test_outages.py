"""Outages of engines that last minutes, with the settings that users get."""

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_training_loop import PRESETS, check_batches, check_nothing_leaks, check_outcomes
from world import StreamingModel, World, build

from rollart.config.rollout import QuarantineConfig, RolloutConfig
from rollart.core.errors import EngineFailed, EngineLost, RollartError
from rollart.core.events import GroupDropped, Quarantined, TrajectoryEnded
from rollart.core.schedule import preset
from rollart.core.types import EngineStatus, GenerationRequest, LoadResult, Outcome, Publication, Sampling
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.quarantine import ENGINE_ROUNDS, Quarantine
from rollart.simulator.clock import run

DEFAULTS = RolloutConfig()
RULE = QuarantineConfig().rule()


def play(name: str, outages: dict[str, tuple[float, float]], **world: Any) -> World:
    """A run with default settings; each engine in `outages` is lost at a time, for a number of seconds."""
    with tempfile.TemporaryDirectory() as folder:

        async def main() -> World:
            made = build(
                preset(name, DEFAULTS.alpha, DEFAULTS.window, 0, 0),
                SqliteLedger.open(Path(folder) / "ledger.sqlite"),
                retries=DEFAULTS.retries,
                deadline=DEFAULTS.trajectory_deadline,
                rule=RULE,
                **world,
            )
            async with asyncio.timeout(1e5), asyncio.TaskGroup() as group:
                for engine, (at, seconds) in outages.items():
                    group.create_task(made.outage(engine, at, seconds))
                await made.pipeline.run()
            await made.scheduler.stop()
            return made

        return run(main())


@pytest.mark.parametrize("name", PRESETS)
def test_ten_minutes_without_any_engine_end_no_run_and_drop_nothing(name: str) -> None:
    world: dict[str, Any] = {"steps": 12, "batch_groups": 8, "group_size": 8, "weights": {"a": 1.0, "b": 1.0}}
    made = play(name, {"engine-0": (7.3, 600.0), "engine-1": (7.3, 660.0)}, **world)
    outcomes = Counter(event.outcome for event in made.recorder.of(TrajectoryEnded))
    assert set(outcomes) <= {Outcome.FINISHED, Outcome.STALE}
    assert not made.recorder.of(Quarantined)
    assert not [event for event in made.recorder.of(GroupDropped) if event.reason != "stale"]
    check_outcomes(made)
    check_batches(made, preset(name, DEFAULTS.alpha, DEFAULTS.window, 0, 0), world)
    check_nothing_leaks(made, world)


@pytest.mark.parametrize("at", [x / 4 for x in range(60)])
def test_one_off_goes_on_whenever_its_only_engine_is_lost(at: float) -> None:
    """Between publish and swap too, when the store no longer has the version that the others serve."""
    made = play("one_off", {"engine-0": (at, 250.0)}, steps=8, engines=1)
    assert len(made.trainer.batches) == 8
    check_batches(made, preset("one_off", 1, 1.0, 0, 0), {"steps": 8, "weights": {"a": 1.0, "b": 1.0}} | SIZES)


def test_a_long_turn_on_a_lost_engine_goes_on_from_the_tokens_it_has() -> None:
    """Turns of 200 s, and an engine that is lost every 150 s: from the beginning, none would ever end."""
    with tempfile.TemporaryDirectory() as folder:

        async def main() -> World:
            made = build(
                preset("rollart", 1, 2.0, 0, 0),
                SqliteLedger.open(Path(folder) / "ledger.sqlite"),
                steps=2,
                engines=1,
                deadline=DEFAULTS.trajectory_deadline,
                engine={"seconds": lambda rng: 200.0, "tokens": 8},
                environments={"turns": lambda rng: 1},
                rule=RULE,
            )

            async def flap() -> None:
                registry, engine = made.router.engines, made.engines["engine-0"]
                while True:
                    await asyncio.sleep(150.0)
                    engine.lose()
                    registry.mark_lost("engine-0", "an outage")
                    await asyncio.sleep(20.0)
                    engine = StreamingModel(made.rng, seconds=engine.seconds, tokens=engine.tokens)
                    registry.add("engine-0", engine, await registry.catch_up(engine))

            flapping = asyncio.create_task(flap())
            async with asyncio.timeout(1e5):
                await made.pipeline.run()
            flapping.cancel()
            await made.scheduler.stop()
            return made

        made = run(main())
    outcomes = Counter(event.outcome for event in made.recorder.of(TrajectoryEnded))
    assert set(outcomes) <= {Outcome.FINISHED, Outcome.CANCELLED}
    turns = [sample for batch in made.trainer.batches for group in batch.groups for sample in group.samples]
    assert len(turns) == 2 * 4 * 2


def test_the_version_of_a_first_token_is_known_at_once() -> None:
    """The bound in flight holds within a turn: what is too old is dropped while it is generated, not after it."""
    seen: list[tuple[float, int]] = []

    async def main() -> None:
        with tempfile.TemporaryDirectory() as folder:
            ledger = SqliteLedger.open(Path(folder) / "l.sqlite")
            made = build(preset("rollart", 1, 2.0, 0, 0), ledger, engine={"seconds": lambda rng: 80.0, "tokens": 8})
            request = GenerationRequest("r", "s", "a", 0, [1, 2], Sampling(max_tokens=8))
            now = asyncio.get_running_loop().time
            await made.router.generate(request, on_version=lambda version: seen.append((now(), version)))

    run(main())
    assert seen == [(10.0, 0)]


SIZES = {"batch_groups": 4, "group_size": 2}


class Newcomer:
    """An engine that has just started. The store has only the newest version."""

    def __init__(self, newest: int) -> None:
        self.newest, self.version = newest, 0

    async def status(self) -> EngineStatus:
        return EngineStatus(self.version, 0, 0, 0, 0, 0, 0, 0, 0.0)

    async def load(self, publication: Publication) -> LoadResult:
        if publication.version != self.newest:
            raise EngineFailed(f"version {publication.version} is not in the store")
        self.version = publication.version
        return LoadResult(self.version)


def test_an_engine_that_starts_between_publish_and_swap_loads_what_is_published() -> None:
    async def main() -> int:
        registry = EngineRegistry(version=0)
        await registry.load(Publication(3))
        registry.announce(Publication(4))  # engines that serve version 3 swap later
        engine: Any = Newcomer(4)
        return await registry.catch_up(engine)

    assert run(main()) == 4


def test_the_clock_of_an_episode_stands_still_while_any_of_its_requests_waits() -> None:
    async def main() -> tuple[float, float]:
        clock, now = EpisodeClock(10.0), asyncio.get_running_loop().time

        async def wait(begin: float, seconds: float) -> None:
            await asyncio.sleep(begin)
            with clock.paused():
                await asyncio.sleep(seconds)

        with pytest.raises(TimeoutError):
            async with clock.limit(), asyncio.TaskGroup() as group:
                for begin, seconds in ((2.0, 100.0), (50.0, 100.0), (155.0, 5.0)):
                    group.create_task(wait(begin, seconds))
                await asyncio.sleep(1000.0)
        return now(), clock.waited_s

    assert run(main()) == (163.0, 153.0)


def test_an_outage_that_ends_with_the_last_engine_removed_fails_the_requests() -> None:
    async def main() -> set[Outcome]:
        with tempfile.TemporaryDirectory() as folder:
            made = build(preset("rollart", 1, 2.0, 0, 0), SqliteLedger.open(Path(folder) / "l.sqlite"), engines=1)
            registry = made.router.engines
            registry.mark_lost("engine-0", "an outage")
            evaluation = asyncio.create_task(made.evaluator.run(0, 4))
            await asyncio.sleep(1000.0)
            registry.remove("engine-0")
            await evaluation
            return {event.outcome for event in made.recorder.of(TrajectoryEnded)}

    assert run(main()) == {Outcome.ENGINE_FAILED}


def test_an_outage_that_fails_many_trajectories_counts_against_no_task() -> None:
    machine = Quarantine({"a": "", "b": "judge:score"}, RULE)
    for _ in range(1000):
        assert machine.record("a", Outcome.ENGINE_FAILED, started=0.0, ended=5.0) is None
        assert machine.group_failed("a", Outcome.ENGINE_FAILED) is None


def test_engines_that_fail_a_task_again_and_again_put_it_out_so_that_nothing_is_retried_for_ever() -> None:
    machine = Quarantine({"a": ""}, RULE)
    for number in range(ENGINE_ROUNDS):
        assert machine.active == ["a"]
        fault = machine.record("a", Outcome.ENGINE_FAILED, started=float(number), ended=number + 1.0)
    assert fault is not None and fault.tasks == ("a",) and "engines failed its trajectories" in fault.why


def test_a_success_between_failures_of_engines_forgets_them() -> None:
    machine = Quarantine({"a": ""}, RULE)
    for number in range(50):
        ended = number + 1.0
        assert machine.record("a", Outcome.ENGINE_FAILED, started=float(number), ended=ended) is None
        assert machine.record("a", Outcome.FINISHED, started=float(number), ended=ended) is None


def test_failing_rewards_count_for_their_function_and_take_out_the_tasks_that_share_it() -> None:
    machine = Quarantine({"a": "judge:score", "b": "judge:score", "c": ""}, RULE)
    faults = [machine.record("ab"[n % 2], Outcome.REWARD_FAILED) for n in range(RULE.min_count)]
    assert faults[:-1] == [None] * (RULE.min_count - 1)
    assert faults[-1] is not None and faults[-1].tasks == ("a", "b")
    assert faults[-1].why == "20 of the last 20 scores by judge:score failed"
    for task in faults[-1].tasks:
        machine.quarantine(task, 0.0)
    assert machine.active == ["c"]
    assert all(machine.record("c", Outcome.FINISHED) is None for _ in range(100))


def test_rewards_that_fail_do_not_hide_an_environment_that_fails() -> None:
    machine = Quarantine({"a": ""}, RULE)
    faults = [machine.record("a", Outcome.ENV_FAILED) for _ in range(RULE.min_count)]
    assert faults[-1] is not None and "trajectories failed" in faults[-1].why


class LosingEngine:
    """Its requests always end with the loss of the engine, at once."""

    async def generate(self, request: Any) -> Any:
        raise EngineLost("it is gone")


def test_requests_that_no_engine_survives_end_the_run_with_that_reason() -> None:
    """Engines come back at once and are lost again: nothing is retried for ever."""

    async def main() -> World:
        with tempfile.TemporaryDirectory() as folder:
            ledger = SqliteLedger.open(Path(folder) / "ledger.sqlite")
            made = build(preset("rollart", 1, 2.0, 0, 0), ledger, engines=1, retries=3, rule=RULE)
            registry = made.router.engines

            async def revive() -> None:
                while True:
                    engine: Any = LosingEngine()
                    registry.add("engine-0", engine, 0)
                    await asyncio.sleep(1.0)

            reviving = asyncio.create_task(revive())
            try:
                async with asyncio.timeout(1e4):
                    await made.pipeline.run()
            finally:
                reviving.cancel()
        return made

    with pytest.raises(ExceptionGroup) as caught:
        run(main())
    reason = caught.value.subgroup(RollartError)
    assert reason is not None and "engines failed its trajectories" in repr(reason.exceptions)


def test_requests_of_one_conversation_only_grow_also_when_an_engine_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine was sent before is left out of the next request, so it must be its beginning."""
    seen: dict[int, list[int]] = {}
    episodes: dict[int, str] = {}
    generate_in_parts = StreamingModel.generate_in_parts

    async def recorded(engine: StreamingModel, request: GenerationRequest, *more: Any) -> Any:
        before = seen.get(request.conversation, [])
        assert request.tokens[: len(before)] == before
        seen[request.conversation] = list(request.tokens)
        assert episodes.setdefault(request.conversation, request.episode) == request.episode
        return await generate_in_parts(engine, request, *more)

    monkeypatch.setattr(StreamingModel, "generate_in_parts", recorded)
    turns = {"turns": lambda rng: rng.randint(1, 9), "failures": 0.05}
    play("rollart", {"engine-0": (2.0, 5.0)}, steps=6, environments=turns)
    assert 0 not in seen
    assert max(map(len, seen.values())) > 40
