"""Filters of groups, weights that change, running success: state machines, and the scheduler on virtual time."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_training_loop import check_nothing_leaks, check_outcomes, play, worlds
from world import World

from rollart.core.events import GroupDropped
from rollart.core.schedule import GroupRule, Schedule, SuccessBand, WeightPlan, preset
from rollart.core.types import Outcome, Trajectory
from rollart.rollout.filters import LESS_SPREAD, NO_SPREAD, TOO_EASY, TOO_HARD, Curriculum, GroupFilters, spread
from rollart.rollout.groups import Group
from rollart.rollout.ledger import GroupRecord, SqliteLedger
from rollart.rollout.mixture import Mixture


def ended(reward: float, task: str = "t", success: bool | None = None, name: str = "") -> Trajectory:
    return Trajectory(name or f"{reward}", task, "g", 0, 0, Outcome.FINISHED, reward=reward, success=success)


def complete(name: str, rewards: list[float], task: str = "t") -> Group:
    group = Group(name, task, 0, 0, len(rewards), 0)
    group.done = [ended(reward, task) for reward in rewards]
    return group


@pytest.mark.parametrize(
    ("rule", "rewards", "reason"),
    [
        (GroupRule(spread=True), [1.0, 1.0], NO_SPREAD),
        (GroupRule(spread=True), [0.0, 0.0], NO_SPREAD),
        (GroupRule(spread=True), [0.0, 1.0], ""),
        (GroupRule(low=0.25), [0.0] * 4, TOO_HARD),
        (GroupRule(low=0.25, high=0.75), [1.0, 1.0, 1.0, 0.0], ""),
        (GroupRule(high=0.75), [1.0] * 4, TOO_EASY),
        (GroupRule(), [1.0, 1.0], ""),
    ],
)
def test_a_group_is_dropped_for_a_reason(rule: GroupRule, rewards: list[float], reason: str) -> None:
    assert GroupFilters({"t": rule}).verdict(complete("g", rewards)) == reason
    assert GroupFilters({"other": rule}).verdict(complete("g", rewards)) == ""


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_after_its_tries_a_group_is_trained_whatever_it_is(flat: list[bool], tries: int) -> None:
    filters, row = GroupFilters({"t": GroupRule(spread=True, tries=tries)}), 0
    for number, same in enumerate(flat):
        reason = filters.verdict(complete(f"g{number}", [1.0, 1.0 if same else 0.0]))
        assert bool(reason) == (same and row < tries)
        row = row + 1 if reason else 0


ROWS = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=12)


@given(ROWS, st.floats(0.1, 1.0))
def test_the_groups_with_most_spread_are_kept_in_their_order(rows: list[list[float]], keep: float) -> None:
    filters = GroupFilters({"t": GroupRule(keep=keep)})
    groups = [complete(f"g{number:02d}", row) for number, row in enumerate(rows)]
    need = max(n for n in range(len(groups) + 1) if filters.candidates({"t": n})["t"] <= len(groups))
    batch, others = filters.choose(groups, {"t": need})
    assert len(batch) == need and sorted(g.id for g in batch + others) == [g.id for g in groups]
    assert [g.id for g in batch] == sorted(g.id for g in batch)
    assert min(map(spread, batch), default=9.0) >= max(map(spread, others), default=0.0)


def test_a_share_is_kept_of_as_many_candidates() -> None:
    filters = GroupFilters({"a": GroupRule(keep=0.25)})
    assert filters.candidates({"a": 3, "b": 2}) == {"a": 12, "b": 2}


PLANS = st.lists(st.tuples(st.integers(1, 6), st.floats(0.0, 3.0)), min_size=1, max_size=4).map(
    lambda steps: tuple((sum(gap for gap, _ in steps[:n]), factor) for n, (_, factor) in enumerate(steps))
)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), PLANS, st.booleans()), min_size=1, max_size=5),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 20), st.floats(0.1, 1.0)), max_size=3),
)
def test_a_mixture_whose_weights_change_stays_exact(
    tasks: list[tuple[float, tuple[tuple[int, float], ...], bool]], groups: int, changes: list[tuple[int, float]]
) -> None:
    """After any batch every task has its share of all batches so far, but for two groups; one has a constant weight."""
    weights = {f"t{n}": weight for n, (weight, _, _) in enumerate(tasks)} | {"steady": 1.0}
    plans = {f"t{n}": WeightPlan(points, linear) for n, (_, points, linear) in enumerate(tasks)}
    mixture, factor = Mixture(weights, groups, plans), 1.0
    exact, counts = Counter[str](), Counter[str]()
    for batch in range(25):
        for at, new in changes:
            if at == batch:
                mixture.quota(batch + 3)  # looked ahead, as admission does
                mixture.scale({"t0": new}, batch)
                factor = new
        now = {task: weight * (plans[task].at(batch) if task in plans else 1.0) for task, weight in weights.items()}
        now["t0"] *= factor
        quota = mixture.quota(batch)
        assert sum(quota.values()) == groups
        counts.update(quota)
        for task, weight in now.items():
            exact[task] += weight / sum(now.values()) * groups  # type: ignore[assignment]
            assert abs(counts[task] - exact[task]) <= 2.0


def test_a_weight_may_step_or_run_along_a_line() -> None:
    line, steps = (WeightPlan(((2, 1.0), (4, 0.0)), linear) for linear in (True, False))
    assert [line.at(step) for step in range(6)] == [1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert [steps.at(step) for step in range(6)] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    mixture = Mixture({"a": 1, "b": 1}, 2, {"b": steps})
    assert [mixture.quota(batch)["b"] for batch in range(6)] == [1, 1, 1, 1, 0, 0]


def test_a_task_outside_of_its_band_has_less_weight() -> None:
    machine = Curriculum({"t": SuccessBand(0.25, 0.75, outside=0.5, window=4)})
    seen = []
    for reward in [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]:
        machine.record(ended(reward))
        machine.record(ended(1.0, task="another"))
        seen.append(machine.factors()["t"])
    assert seen == [1.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.5]  # success of the last four: 0, 1/4, 2/4, 3/4, 1
    machine.record(Trajectory("x", "t", "g", 0, 0, Outcome.ENV_FAILED, reward=0.0))
    assert machine.factors() == {"t": 0.5}  # a failure says nothing of the policy


def test_what_the_reward_function_calls_success_counts_before_the_reward() -> None:
    machine = Curriculum({"t": SuccessBand(0.5, 1.0, outside=0.5, window=1)})
    machine.record(ended(1.0, success=False))
    assert machine.factors() == {"t": 0.5}


def test_a_resumed_run_knows_the_last_results(tmp_path: Path) -> None:
    ledger = SqliteLedger.open(tmp_path / "ledger.sqlite")
    ledger.start(GroupRecord("g", "t", 0, 0, 4, 0))
    for number, (reward, success) in enumerate([(1.0, None), (0.0, None), (1.0, False), (0.0, True)]):
        made = ended(reward, success=success, name=f"g.{number}")
        ledger.add(Trajectory(**{**{k: getattr(made, k) for k in made.__struct_fields__}, "started_s": float(number)}))
    assert ledger.recover().recent == {"t": [True, False, False, True]}
    machine = Curriculum({"t": SuccessBand(0.9, 1.0, outside=0.5, window=3)})
    machine.restore(ledger.recover().recent)
    assert machine.factors() == {"t": 0.5}


RULES = st.builds(
    GroupRule,
    spread=st.booleans(),
    low=st.sampled_from([0.0, 0.3]),
    high=st.sampled_from([1.0, 0.9]),
    tries=st.integers(1, 4),
    keep=st.sampled_from([1.0, 0.5, 0.4]),
)


@st.composite
def filtered_worlds(draw: Any) -> dict[str, Any]:
    world = draw(worlds())
    own: dict[str, dict[str, Any]] = {
        task: {
            "rule": draw(st.none() | RULES),
            "group_size": draw(st.sampled_from([0, 2, 4])),
            "plan": draw(st.none() | st.just(WeightPlan(((0, 1.0), (3, 0.3)), linear=True))),
            "band": draw(st.none() | st.just(SuccessBand(0.2, 0.6, outside=0.5, window=4))),
        }
        for task in world["weights"]
    }
    chance = draw(st.sampled_from([0.05, 0.5, 0.95]))
    world["rewards"]["value"] = lambda rng: float(rng.random() < chance)
    return {**world, "own": own, "outages": ()}


@pytest.mark.slow
@settings(max_examples=80)
@given(filtered_worlds())
def test_filtered_batches_keep_mixture_size_and_staleness(world: dict[str, Any]) -> None:
    schedule = world.pop("schedule")
    made = play(schedule, **world)
    check_outcomes(made)
    check_filtered_batches(made, schedule, world)
    check_nothing_leaks(made, world)


def check_filtered_batches(made: World, schedule: Schedule, world: dict[str, Any]) -> None:
    """What is trained: groups of the task's size, within the bound, all that are flat let through by `tries`."""
    own, flat = world["own"], Counter[str]()
    assert len(made.trainer.batches) == world["steps"]
    for batch in made.trainer.batches:
        assert world["batch_groups"] <= len(batch.groups) <= world["batch_groups"] * schedule.elastic
        for group in batch.groups:
            assert len(group.samples) == (own[group.task]["group_size"] or world["group_size"])
            rewards = {sample.reward for sample in group.samples}
            flat[group.task] += len(rewards) == 1
            oldest = min(int(sample.versions.array.min()) for sample in group.samples)
            assert not schedule.enforce or batch.step - oldest <= schedule.alpha
    reasons = Counter((event.task, event.reason) for event in made.recorder.of(GroupDropped))
    for task, mine in own.items():
        rule = mine["rule"]
        if rule is not None and rule.spread and rule.low == 0.0 and rule.high == 1.0:
            assert reasons[task, NO_SPREAD] >= rule.tries * flat[task]
        if rule is None:
            assert not any(reasons[task, reason] for reason in (NO_SPREAD, TOO_EASY, TOO_HARD, LESS_SPREAD))


def test_dropped_groups_are_replaced_and_counted() -> None:
    rng = random.Random(0)
    world: dict[str, Any] = {
        "weights": {"a": 1.0, "b": 1.0},
        "batch_groups": 4,
        "steps": 5,
        "own": {"a": {"rule": GroupRule(spread=True, tries=50)}, "b": {"rule": GroupRule(keep=0.5)}},
        "rewards": {"value": lambda _: float(rng.random() < 0.3)},
    }
    made = play(preset("rollart", 1, 2.0, 0, 0), **world)
    for batch in made.trainer.batches:
        assert Counter(group.task for group in batch.groups) == {"a": 2, "b": 2}
        assert all(len({s.reward for s in group.samples}) > 1 for group in batch.groups if group.task == "a")
    reasons = Counter((event.task, event.reason) for event in made.recorder.of(GroupDropped))
    assert reasons["a", NO_SPREAD] > 0
    assert reasons["b", LESS_SPREAD] == 2 * len(made.trainer.batches)
    assert made.ledger.group_states()["dropped"] == sum(reasons.values())
