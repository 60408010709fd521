from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import Outcome, Trajectory
from rollart.rollout.groups import Group
from rollart.rollout.mixture import Mixture, choose_batch


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 30))
def test_every_task_stays_within_one_group_of_its_exact_share(weights: list[float], groups: int, batches: int) -> None:
    tasks = {f"t{n}": weight for n, weight in enumerate(weights)}
    mixture = Mixture(tasks, groups)
    counts: Counter[str] = Counter()
    for batch in range(batches):
        quota = mixture.quota(batch)
        assert sum(quota.values()) == groups
        counts.update(quota)
        for task, weight in tasks.items():
            share = weight / sum(weights) * groups * (batch + 1)
            assert abs(counts[task] - share) <= 1.0 + 1e-6


def test_equal_weights_give_equal_batches() -> None:
    assert Mixture({"a": 1, "b": 1, "c": 1}, 6).quota(17) == {"a": 2, "b": 2, "c": 2}


def test_quotas_do_not_depend_on_the_order_of_calls() -> None:
    ahead, in_order = Mixture({"a": 3, "b": 2}, 3), Mixture({"a": 3, "b": 2}, 3)
    last = ahead.quota(9)
    assert [in_order.quota(n) for n in range(10)][9] == last


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 12), st.sets(st.integers(0, 5))), min_size=1, max_size=4),
)
def test_active_tasks_stay_within_one_group_of_its_share_since_the_last_change(
    weights: list[float], groups: int, changes: list[tuple[int, set[int]]]
) -> None:
    tasks = {f"t{n}": weight for n, weight in enumerate(weights)}
    mixture, start = Mixture(tasks, groups), 0
    for later, chosen in changes:
        active = [f"t{n}" for n in sorted(chosen) if n < len(weights)] or ["t0"]
        past = [dict(mixture.quota(batch)) for batch in range(start)]
        mixture.quota(start + 5)  # looked ahead, as admission does
        mixture.only(active, start)
        assert [mixture.quota(batch) for batch in range(start)] == past
        counts: Counter[str] = Counter()
        for batch in range(start, start + later):
            quota = mixture.quota(batch)
            assert sum(quota.values()) == groups
            assert set(quota) == set(tasks)
            counts.update({task: count for task, count in quota.items() if count})
            for task in active:
                share = tasks[task] / sum(tasks[name] for name in active) * groups * (batch - start + 1)
                assert abs(counts[task] - share) <= 1.0 + 1e-6
        assert set(counts) <= set(active)
        start += later


@given(st.permutations(["a", "b", "c", "d"]), st.lists(st.floats(0.2, 5.0), min_size=4, max_size=4), st.integers(1, 7))
def test_the_order_in_which_tasks_are_named_changes_nothing(
    order: list[str], weights: list[float], groups: int
) -> None:
    tasks = dict(zip("abcd", weights, strict=True))
    one, other = Mixture(tasks, groups), Mixture(tasks, groups)
    one.only("abcd", 2)
    other.only(order, 2)
    assert [one.quota(batch) for batch in range(14)] == [other.quota(batch) for batch in range(14)]


def group(name: str, task: str, ready: bool) -> Group:
    made = Group(name, task, 0, 0, 1, 0)
    if ready:
        made.done.append(Trajectory(f"{name}.0", task, name, 0, 0, Outcome.FINISHED))
    return made


def row(task: str, *ready: bool) -> dict[str, Group]:
    return {f"{task}{n}": group(f"{task}{n}", task, is_ready) for n, is_ready in enumerate(ready)}


def names(batch: list[Group] | None) -> list[str] | None:
    return None if batch is None else [group.id for group in batch]


def test_a_batch_takes_ready_groups_in_start_order() -> None:
    groups = {"a": row("a", True, False, True, True)}
    assert names(choose_batch({"a": 2}, groups, 2.0)) == ["a0", "a2"]


def test_a_group_outside_the_window_may_not_overtake() -> None:
    groups = {"a": row("a", False, True, True, True)}
    assert choose_batch({"a": 2}, groups, 1.0) is None
    assert names(choose_batch({"a": 2}, groups, 1.5)) == ["a1", "a2"]


def test_a_batch_waits_until_every_task_can_fill_its_share() -> None:
    groups = {"a": row("a", True, True), "b": row("b", False)}
    assert choose_batch({"a": 1, "b": 1}, groups, 2.0) is None
    assert names(choose_batch({"a": 2, "b": 0}, groups, 2.0)) == ["a0", "a1"]


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 6), st.sampled_from([1.0, 1.5, 2.0, 4.0]))
def test_the_batch_is_the_first_ready_ones_of_the_window_or_nothing(
    ready: list[bool], need: int, window: float
) -> None:
    within = [f"a{n}" for n, is_ready in enumerate(ready[: max(need, int(need * window))]) if is_ready]
    assert names(choose_batch({"a": need}, {"a": row("a", *ready)}, window)) == (
        within[:need] if len(within) >= need else None
    )
