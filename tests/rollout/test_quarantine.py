"""Tasks that fail for a while: the state machine alone, and the whole control plane on virtual time."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training_loop import PRESETS, check_nothing_leaks, check_outcomes, play, worlds
from world import World, build

from rollart.core.errors import RollartError
from rollart.core.events import BatchTaken, GroupDropped, GroupStarted, Quarantined, Released, TrajectoryEnded
from rollart.core.schedule import QuarantineRule, preset
from rollart.core.types import Outcome
from rollart.rollout.ledger import GroupRecord, SqliteLedger
from rollart.rollout.mixture import Mixture
from rollart.rollout.quarantine import MAX_BACKOFF, Fault, Quarantine
from rollart.simulator.clock import run

RULE = QuarantineRule(rate=0.5, window=10, min_count=4, groups=3, wait=10.0)
OURS = preset("rollart", 1, 2.0, 0, 0)
BAD, GOOD = Outcome.ENV_FAILED, Outcome.FINISHED


def test_a_task_goes_out_by_its_rate_once_enough_trajectories_count() -> None:
    machine = Quarantine({"a": "", "b": ""}, RULE)
    assert [machine.record("a", outcome) for outcome in (BAD, BAD, Outcome.CANCELLED, BAD)] == [None] * 4
    assert machine.record("a", BAD) == Fault(("a",), "4 of its last 4 trajectories failed")
    assert machine.record("b", BAD) is None


def test_only_the_window_counts() -> None:
    machine = Quarantine({"a": ""}, RULE)
    for outcome in [GOOD] * 4 + [BAD] * 3 + [GOOD] * 10:
        assert machine.record("a", outcome) is None
    assert [machine.record("a", BAD) is None for _ in range(5)] == [True] * 4 + [False]


def test_a_task_goes_out_by_groups_given_up_in_a_row() -> None:
    machine = Quarantine({"a": ""}, RULE)
    assert machine.group_failed("a", BAD) is None
    assert machine.group_failed("a", BAD) is None
    machine.group_completed("a")
    assert [machine.group_failed("a", BAD) is None for _ in range(3)] == [True, True, False]


def test_each_wait_is_twice_the_last_up_to_a_limit_and_a_good_window_forgives() -> None:
    machine = Quarantine({"a": "", "b": ""}, RULE)
    assert machine.quarantine("a", 0.0) == 10.0
    assert machine.active == ["b"]
    assert machine.due(9.9) == []
    assert machine.due(10.0) == ["a"]
    assert machine.due(11.0) == []  # being probed
    assert machine.probe_failed("a", 12.0) == 20.0
    assert machine.due(31.9) == [] and machine.due(32.0) == ["a"]
    assert machine.release("a", 40.0) == 40.0
    assert machine.quarantine("a", 50.0) == 40.0
    for _ in range(10):
        last = machine.probe_failed("a", 60.0)
    assert last == RULE.wait * MAX_BACKOFF
    machine.release("a", 70.0)
    for _ in range(10):
        machine.record("a", GOOD)
    assert machine.quarantine("a", 80.0) == 10.0


def check_mixture(made: World, weights: dict[str, float], groups: int, steps: int, elastic: float = 1.0) -> None:
    """Every batch is the exact mixture of the tasks that were in when it was taken, and nothing else."""
    mixture, active, step = Mixture(weights, groups), set(weights), 0
    for event in made.recorder.events:
        now = active
        if isinstance(event, Quarantined):
            now = active - {event.task}
        elif isinstance(event, Released):
            now = active | {event.task}
        if now != active:  # and not for a probe that failed
            active = now
            mixture.only(active, step)
        if isinstance(event, BatchTaken):
            size = sum(event.groups.values())
            assert groups <= size <= groups * elastic
            mixture.resize(size, event.step)
            assert event.groups == {task: need for task, need in mixture.quota(event.step).items() if need}
            step += 1
    assert step == steps


@pytest.mark.slow
@settings(max_examples=60)
@given(worlds(), st.floats(0.0, 20.0), st.floats(0.5, 200.0), st.integers(0, 6), st.floats(0.5, 20.0))
def test_every_random_world_keeps_the_invariants_while_a_task_fails(
    world: dict[str, Any], begin: float, lasts: float, retries: int, wait: float
) -> None:
    schedule = world.pop("schedule")
    world["weights"] = {**world["weights"], "sound": 1.0}
    world["batch_groups"] += 1
    world["steps"] += 6
    for part in ("environments", "engine", "rewards"):
        world[part]["failures"] = min(world[part]["failures"], 0.02)
    made = play(
        schedule,
        **world,
        retries=retries + 2,
        broken={"task0": (begin, begin + lasts)},
        rule=QuarantineRule(rate=0.6, window=12, min_count=8, groups=10, wait=wait),
    )
    world.pop("outages")
    check_outcomes(made)
    check_nothing_leaks(made, world)
    check_mixture(made, world["weights"], world["batch_groups"], world["steps"], schedule.elastic)
    trained = [sample.id for batch in made.trainer.batches for group in batch.groups for sample in group.samples]
    assert len(trained) == len(set(trained))
    for batch in made.trainer.batches:
        for group in batch.groups:
            for sample in group.samples:
                versions = sample.versions.array.tolist()
                assert max(versions) <= batch.step
                assert not schedule.enforce or batch.step - min(versions) <= schedule.alpha


@pytest.mark.parametrize("name", PRESETS)
def test_a_task_that_fails_for_a_while_is_left_out_probed_and_taken_back(name: str) -> None:
    made = play(
        preset(name, 1, 2.0, 0, 0),
        steps=60,
        retries=2,
        weights={"a": 1.0, "b": 2.0, "c": 1.0},
        broken={"b": (4.0, 30.0)},
        rule=RULE,
    )
    out, back = made.recorder.of(Quarantined), made.recorder.of(Released)
    assert {event.task for event in out} == {"b"} == {event.task for event in back}
    assert "trajectories failed, the last as env_failed: the environment is broken for now" in out[0].reason
    assert [event.wait_s for event in out] == [10.0 * 2**n for n in range(len(out))]
    shares = [event.groups for event in made.recorder.of(BatchTaken)]
    assert {"a": 2, "c": 2} in shares
    assert shares[0] == shares[-1] == {"a": 1, "b": 2, "c": 1}
    check_mixture(made, {"a": 1.0, "b": 2.0, "c": 1.0}, 4, 60)


def test_while_a_task_is_out_nothing_of_it_starts_but_probes() -> None:
    made = play(OURS, steps=30, retries=2, broken={"b": (0.0, 1e9)}, rule=RULE)
    events = made.recorder.events
    first = next(number for number, event in enumerate(events) if isinstance(event, Quarantined))
    started = [event for event in events[first:] if isinstance(event, GroupStarted) and event.task == "b"]
    assert len(started) == len(made.recorder.of(Quarantined)) - 1 + (made.scheduler.running > 0)
    reasons = {event.reason for event in made.recorder.of(GroupDropped) if event.task == "b"}
    assert reasons == {"its task is quarantined", "too many failed members, the last: env_failed"}
    assert not made.recorder.of(Released)


def test_a_probe_that_grew_too_old_is_not_trained_but_takes_its_task_back() -> None:
    """The task that comes back is so slow that the others train many versions meanwhile."""
    rule = QuarantineRule(rate=0.5, window=10, min_count=4, groups=3, wait=1.0)
    made = play(
        OURS,
        steps=40,
        retries=2,
        seed=3,
        broken={"b": (0.0, 5.0)},
        environments={"turns": lambda rng: 40},
        trainer={"seconds": lambda rng: 0.01},
        rule=rule,
    )
    assert made.recorder.of(Released)
    assert made.recorder.of(BatchTaken)[-1].groups == {"a": 2, "b": 2}


def test_failed_rewards_count_as_failures_of_their_task_too() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        play(OURS, steps=4, retries=2, rewards={"failures": 1.0}, rule=RULE)
    reason = caught.value.subgroup(RollartError)
    assert reason is not None
    assert "every task fails and nothing is left to train on" in repr(reason.exceptions)
    assert "the modelled reward failed" in repr(reason.exceptions)


def test_when_the_only_task_fails_the_run_ends_with_the_reason() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        play(OURS, steps=20, weights={"a": 1.0}, broken={"a": (3.0, 1e9)}, rule=RULE)
    reason = caught.value.subgroup(RollartError)
    assert reason is not None
    assert "task a fails and nothing is left to train on" in repr(reason.exceptions)


def test_a_task_below_the_limit_stays_in() -> None:
    made = play(
        OURS,
        steps=10,
        environments={"failures": 0.05},
        rule=QuarantineRule(rate=0.9, window=50, min_count=20, groups=50),
    )
    assert not made.recorder.of(Quarantined)
    counts = Counter(event.outcome for event in made.recorder.of(TrajectoryEnded))
    assert counts[Outcome.ENV_FAILED] > 0


@pytest.mark.parametrize("works_after", [0.0, 1e9])
def test_a_task_that_was_out_stays_out_over_a_resume_and_is_probed_at_once(tmp_path: Path, works_after: float) -> None:
    async def main() -> tuple[World, World]:
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
        first = build(OURS, ledger, steps=30, retries=2, broken={"b": (0.0, 1e9)}, rule=RULE)
        await first.pipeline.run()
        await first.scheduler.stop()
        second = build(OURS, ledger, steps=45, retries=2, broken={"b": (0.0, works_after)}, rule=RULE)
        await second.pipeline.run()
        await second.scheduler.stop()
        return first, second

    first, second = run(main())
    times = len(first.recorder.of(Quarantined))
    again, *later = second.recorder.of(Quarantined)
    assert (again.task, again.wait_s) == ("b", 0.0) and "before the run was resumed" in again.reason
    shares = [event.groups for event in second.recorder.of(BatchTaken)]
    if works_after:
        assert later and later[0].wait_s == RULE.wait * 2**times
        assert shares == [{"a": 4}] * len(shares)
    else:
        assert not later and [event.task for event in second.recorder.of(Released)] == ["b"]
        assert shares[-1] == {"a": 2, "b": 2}


def test_a_resume_counts_the_open_groups_that_it_drops(tmp_path: Path) -> None:
    async def main() -> World:
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
        ledger.quarantine("b", 1)
        for task in ("b", "gone"):
            ledger.start(GroupRecord(f"{task}-000000", task, 0, seed=0, size=4, version=0))
        made = build(OURS, ledger, steps=2, rule=RULE)
        await made.pipeline.run()
        await made.scheduler.stop()
        return made

    dropped = {event.group: event.reason for event in run(main()).recorder.of(GroupDropped)}
    assert dropped["b-000000"] == "its task is quarantined"
    assert dropped["gone-000000"] == "the task is gone from the run file"


def test_after_a_run_that_ended_because_every_task_failed_each_has_a_new_chance(tmp_path: Path) -> None:
    async def main() -> World:
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
        for task in ("a", "b"):
            ledger.quarantine(task, 3)
        made = build(OURS, ledger, steps=4, rule=RULE)
        await made.pipeline.run()
        await made.scheduler.stop()
        assert ledger.recover().quarantined == {}
        return made

    assert not run(main()).recorder.of(Quarantined)
