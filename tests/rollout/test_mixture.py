from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollart.rollout.mixture import Mixture


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 40), st.integers(1, 30))
def test_every_task_stays_within_one_group_of_its_exact_share(weights: list[float], groups: int, batches: int) -> None:
    tasks = {f"t{n}": weight for n, weight in enumerate(weights)}
    mixture = Mixture(tasks, groups)
    given_out: Counter[str] = Counter()
    for batch in range(batches):
        quota = mixture.quota(batch)
        assert sum(quota.values()) == groups
        given_out.update(quota)
        for task, weight in tasks.items():
            share = weight / sum(weights) * groups * (batch + 1)
            assert abs(given_out[task] - share) <= 1.0 + 1e-6


def test_equal_weights_give_equal_batches() -> None:
    assert Mixture({"a": 1, "b": 1, "c": 1}, 6).quota(17) == {"a": 2, "b": 2, "c": 2}


def test_a_batch_asked_for_out_of_order_is_the_same() -> None:
    ahead, in_order = Mixture({"a": 3, "b": 2}, 3), Mixture({"a": 3, "b": 2}, 3)
    last = ahead.quota(9)
    assert [in_order.quota(n) for n in range(10)][9] == last


@given(
    st.lists(st.floats(0.01, 100), min_size=2, max_size=6),
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(0, 12), st.sets(st.integers(0, 5))), min_size=1, max_size=4),
)
def test_whoever_is_in_stays_within_one_group_of_its_share_since_the_last_change(
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
        given_out: Counter[str] = Counter()
        for batch in range(start, start + later):
            quota = mixture.quota(batch)
            assert sum(quota.values()) == groups
            assert set(quota) == set(tasks)
            given_out.update({task: count for task, count in quota.items() if count})
            for task in active:
                share = tasks[task] / sum(tasks[name] for name in active) * groups * (batch - start + 1)
                assert abs(given_out[task] - share) <= 1.0 + 1e-6
        assert set(given_out) <= set(active)
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
