"""The whole control plane on virtual time, in random worlds."""

import asyncio
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import World, build

from rollart.core.errors import RollartError
from rollart.core.events import (
    BatchTaken,
    Evaluated,
    GroupDropped,
    GroupStarted,
    TrajectoryEnded,
    TrajectoryStarted,
    Warned,
)
from rollart.core.schedule import Schedule, preset
from rollart.core.types import Outcome
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.mixture import Mixture
from rollart.simulator.clock import run

PRESETS = ["sync", "sync_plus", "one_off", "start_bound", "rollart"]


def slow_tail(share: float, slow: float) -> Any:
    return lambda rng: slow * rng.random() if rng.random() < share else 0.3 * rng.random()


@st.composite
def worlds(draw: Any) -> dict[str, Any]:
    failures = st.sampled_from([0.0, 0.0, 0.02, 0.1])
    most = draw(st.integers(1, 8))
    weights = draw(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=3))
    alpha = draw(st.integers(0, 3))
    return {
        "schedule": preset(
            draw(st.sampled_from(PRESETS)),
            alpha,
            draw(st.floats(1.0, 4.0)),
            draw(st.integers(0, 2)),
            draw(st.integers(0, 2)),
            elastic=draw(st.sampled_from([1.0, 1.0, 1.5, 4.0])) if alpha else 1.0,
        ),
        "weights": {f"task{number}": weight for number, weight in enumerate(weights)},
        "batch_groups": draw(st.integers(len(weights), 6)),
        "group_size": draw(st.integers(2, 3)),
        "steps": draw(st.integers(1, 6)),
        "seed": draw(st.integers(0, 1000)),
        "engines": draw(st.integers(1, 3)),
        "evaluate_every": draw(st.integers(0, 3)),
        "environments": {
            "processes": draw(st.integers(1, 40)),
            "turns": lambda rng: rng.randint(1, most),
            "reset_seconds": slow_tail(0.05, 30.0),
            "step_seconds": slow_tail(0.02, 5.0),
            "failures": draw(failures),
        },
        "engine": {"seconds": slow_tail(0.01, 10.0), "load_seconds": slow_tail(0.1, 3.0), "failures": draw(failures)},
        "rewards": {"seconds": slow_tail(0.05, 5.0), "failures": draw(failures)},
        "trainer": {"seconds": lambda rng: 3 * rng.random()},
        "outages": draw(st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 60)), max_size=2)),
    }


def play(schedule: Schedule, outages: Sequence[tuple[float, float]] = (), **world: Any) -> World:
    with tempfile.TemporaryDirectory() as folder:
        ledger = SqliteLedger.open(Path(folder) / "ledger.sqlite")

        async def main() -> World:
            made = build(schedule, ledger, **world)
            async with asyncio.timeout(1e5), asyncio.TaskGroup() as group:
                for number, (at, delay) in enumerate(outages[: len(made.engines)]):
                    group.create_task(made.outage(f"engine-{number}", at, delay))
                await made.pipeline.run()
            await made.scheduler.stop()
            return made

        return run(main())


@pytest.mark.slow
@settings(max_examples=150)
@given(worlds())
def test_every_random_world_keeps_the_invariants(world: dict[str, Any]) -> None:
    schedule = world.pop("schedule")
    made = play(schedule, **world)
    world.pop("outages")
    check_outcomes(made)
    check_batches(made, schedule, world)
    check_nothing_leaks(made, world)


def check_outcomes(made: World) -> None:
    """Every trajectory that started ended once; every group that started was consumed, dropped, or is still open."""
    started = Counter(event.trajectory for event in made.recorder.of(TrajectoryStarted))
    ended = Counter(event.trajectory for event in made.recorder.of(TrajectoryEnded))
    assert started == ended
    assert set(started.values()) <= {1}
    states = made.ledger.group_states()
    assert sum(states.values()) == len(made.recorder.of(GroupStarted))
    assert states.get("dropped", 0) == len(made.recorder.of(GroupDropped))
    assert states.get("leased", 0) == 0


def check_batches(made: World, schedule: Schedule, world: dict[str, Any]) -> None:
    """The bound holds for every trained token, the mixture is exact, and nothing is trained twice."""
    batches = made.trainer.batches
    assert [batch.step for batch in batches] == list(range(world["steps"]))
    outcome = {event.trajectory: event.outcome for event in made.recorder.of(TrajectoryEnded)}
    mixture = Mixture(world["weights"], world["batch_groups"])
    seen: set[str] = set()
    for batch in batches:
        counts = Counter(group.task for group in batch.groups)
        assert world["batch_groups"] <= counts.total() <= world["batch_groups"] * schedule.elastic
        mixture.resize(counts.total(), batch.step)
        assert dict(counts) == {task: need for task, need in mixture.quota(batch.step).items() if need}
        for group in batch.groups:
            assert len(group.samples) == world["group_size"]
            for sample in group.samples:
                assert sample.id not in seen
                assert outcome[sample.id].trainable
                seen.add(sample.id)
                versions = sample.versions.array.tolist()
                assert max(versions) <= batch.step
                if schedule.enforce:
                    assert batch.step - min(versions) <= schedule.alpha


def check_nothing_leaks(made: World, world: dict[str, Any]) -> None:
    assert made.environments.in_use == 0
    assert all(engine.running == 0 for engine in made.engines.values())
    assert made.scheduler.running == made.scheduler.sample(0, 0).scoring == 0
    assert made.router.engines.serving == world["steps"]


@pytest.mark.parametrize("name", PRESETS)
def test_the_same_seed_gives_the_same_events(name: str) -> None:
    def events() -> list[str]:
        schedule = preset(name, 1, 2.0, 1, 0)
        world = play(schedule, steps=5, environments={"turns": lambda rng: rng.randint(1, 9), "failures": 0.05})
        return [repr(event) for event in world.recorder.events]

    assert events() == events()


def test_a_slow_task_keeps_its_share_and_is_not_starved() -> None:
    """One task is fifty times slower; still every batch holds its half, within the bound."""

    def turns(rng: random.Random) -> int:
        return 200 if rng.random() < 0.5 else 2

    made = play(preset("rollart", 1, 2.0, 0, 0), steps=8, max_turns=500, environments={"turns": turns})
    for event in made.recorder.of(BatchTaken):
        assert event.groups == {"a": 2, "b": 2}
        assert set(event.staleness) <= {0, 1}


@pytest.mark.parametrize("alpha", [0, 1, 3])
def test_in_strict_start_order_nothing_is_ever_born_stale(alpha: int) -> None:
    """Admission alone keeps the bound when no group may overtake: not one trajectory is thrown away."""
    for seed in range(5):
        made = play(
            preset("rollart", alpha, 1.0, 0, 0),
            seed=seed,
            steps=12,
            environments={"turns": lambda rng: rng.choice([1, 1, 1, 60]), "reset_seconds": slow_tail(0.1, 20.0)},
            engine={"load_seconds": slow_tail(0.5, 5.0)},
        )
        assert not made.recorder.of(GroupDropped)


def test_surplus_members_are_cancelled_at_the_engine_and_in_the_environment() -> None:
    made = play(
        preset("rollart", 1, 2.0, 2, 0),
        steps=4,
        environments={"turns": lambda rng: 30 if rng.random() < 0.3 else 1},
    )
    ended = made.recorder.of(TrajectoryEnded)
    cancelled = [event for event in ended if event.outcome is Outcome.CANCELLED]
    assert len(cancelled) >= 2 * 4 * 2
    assert sum(engine.aborted for engine in made.engines.values()) > 0
    assert made.environments.in_use == 0


def test_a_group_with_too_many_failures_is_dropped_with_its_reason_and_replaced() -> None:
    made = play(preset("rollart", 1, 2.0, 0, 0), steps=4, retries=1, environments={"failures": 0.2})
    dropped = [event for event in made.recorder.of(GroupDropped) if event.reason != "stale"]
    assert dropped
    assert all("env_failed" in event.reason for event in dropped)
    assert len(made.trainer.batches) == 4


def test_the_synchronous_presets_never_overlap_rollout_and_training() -> None:
    for name in ("sync", "sync_plus"):
        made = play(preset(name, 1, 2.0, 0, 0), steps=4)
        assert all(set(event.staleness) == {0} for event in made.recorder.of(BatchTaken))


def test_one_off_trains_on_the_previous_version() -> None:
    made = play(preset("one_off", 1, 2.0, 0, 0), steps=5)
    ages = [set(event.staleness) for event in made.recorder.of(BatchTaken)]
    assert ages == [{0}, {1}, {1}, {1}, {1}]


def test_presets_are_ordered_by_how_much_they_overlap() -> None:
    """With slow resets and the same work, each freedom that a preset adds shortens the run."""

    def seconds(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:

            async def main() -> float:
                made = build(
                    preset(name, 1, 2.0, 1, 0),
                    SqliteLedger.open(Path(folder) / "ledger.sqlite"),
                    steps=20,
                    batch_groups=8,
                    group_size=4,
                    environments={
                        "turns": lambda rng: rng.randint(1, 10),
                        "reset_seconds": lambda rng: 4.0 if rng.random() < 0.02 else 0.3,
                        "step_seconds": lambda rng: rng.expovariate(20),
                    },
                )
                await made.pipeline.run()
                took = asyncio.get_running_loop().time()
                await made.scheduler.stop()
                return took

            return run(main())

    times = {name: seconds(name) for name in PRESETS}
    assert times["sync"] > times["sync_plus"] > times["one_off"] > times["start_bound"] > times["rollart"]


def test_a_run_goes_on_when_its_only_engine_is_away_while_versions_pass() -> None:
    for name in PRESETS:
        for at in range(1, 12, 2):
            made = play(preset(name, 1, 2.0, 0, 0), steps=8, engines=1, outages=[(float(at), 30.0)])
            assert len(made.trainer.batches) == 8
            assert made.router.engines.serving == 8


def test_evaluation_runs_beside_training_and_is_never_trained() -> None:
    made = play(preset("rollart", 1, 2.0, 0, 0), steps=6, evaluate_every=2)
    assert {event.version for event in made.recorder.of(Evaluated)} >= {2}
    trained = {s.id for batch in made.trainer.batches for group in batch.groups for s in group.samples}
    held_out = {event.trajectory for event in made.recorder.of(TrajectoryStarted) if event.held_out}
    assert held_out and not held_out & trained


def test_an_evaluation_that_cannot_be_played_is_an_error_before_rl_and_a_warning_beside_it(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
        made = build(preset("rollart", 1, 2.0, 0, 0), ledger, environments={"failures": 1.0})
        assert await made.evaluator.run(2, 3) == []
        assert "no held-out episode of task" in made.recorder.of(Warned)[-1].message
        with pytest.raises(RollartError, match="failed to reset"):
            await made.evaluator.run(2, 3, final=True)

    run(main())


def test_one_task_that_cannot_be_played_does_not_cost_the_last_evaluation_of_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
        made = build(preset("rollart", 1, 2.0, 0, 0), ledger, broken={"b": (0.0, 1e9)})
        results = await made.evaluator.run(2, 3, final=True)
        assert [result.task for result in results] == ["a"]
        assert [event.message.split(";")[0] for event in made.recorder.of(Warned)] == [
            "no held-out episode of task b completed"
        ]

    run(main())


@settings(max_examples=40)
@given(worlds(), st.lists(st.floats(0.1, 30.0), min_size=1, max_size=4))
def test_stops_at_any_moment_lose_nothing_and_train_nothing_twice(world: dict[str, Any], stops: list[float]) -> None:
    """Abandon the control plane mid-way, as a kill would, and go on from the ledger; several times."""
    schedule = world.pop("schedule")
    world.pop("outages")
    trained: dict[int, set[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        for stop in [*stops, None]:
            before = SqliteLedger.open(path).recover()
            ready = {t.id for group in before.groups for t in group.trajectories[: group.record.size]}
            made, taken = _one_life(schedule, path, stop, world)
            for step in [step for step in trained if step >= before.version]:
                del trained[step]
            for batch in made.trainer.batches:
                trained[batch.step] = {s.id for group in batch.groups for s in group.samples}
            dropped = {event.group for event in made.recorder.of(GroupDropped)}
            open_now = {t.id for group in SqliteLedger.open(path).recover().groups for t in group.trajectories}
            for trajectory in ready:
                accounted = trajectory in taken or trajectory in open_now or trajectory.rsplit(".", 1)[0] in dropped
                assert accounted, f"{trajectory} was lost"
    counts = Counter(trajectory for batch in trained.values() for trajectory in batch)
    assert sorted(trained) == list(range(world["steps"]))
    assert set(counts.values()) == {1}


def _one_life(schedule: Schedule, path: Path, stop: float | None, world: dict[str, Any]) -> tuple[World, set[str]]:
    async def main() -> World:
        made = build(schedule, SqliteLedger.open(path), **world)
        running = asyncio.create_task(made.pipeline.run())
        await asyncio.wait([running], timeout=stop)
        if running.done():
            running.result()
            await made.scheduler.stop()
        return made

    made = run(main())
    taken: set[str] = set()
    for batch in made.trainer.batches:
        taken |= {sample.id for group in batch.groups for sample in group.samples}
    return made, taken


def test_worlds_differ_from_each_other() -> None:
    """Guards the random tests above: the generator must reach failures, staleness and cancellation."""
    reached: defaultdict[Outcome, int] = defaultdict(int)
    for seed in range(6):
        made = play(
            preset("rollart", 1, 3.0, 1, 1),
            seed=seed,
            steps=8,
            environments={"turns": lambda rng: rng.choice([1, 40]), "failures": 0.03},
            engine={"failures": 0.1},
            rewards={"failures": 0.05},
        )
        for event in made.recorder.of(TrajectoryEnded):
            reached[event.outcome] += 1
    assert set(reached) >= set(Outcome) - {Outcome.TRUNCATED, Outcome.ENGINE_FAILED}
