from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.hardware.balance import balanced

Seconds = dict[str, dict[str, float]]
times = st.floats(0.1, 10)


def last_to_end(seconds: Seconds, shares: Seconds) -> float:
    pools = {pool for task in seconds.values() for pool in task}
    return max(sum(seconds[task].get(pool, 0) * shares[task].get(pool, 0) for task in seconds) for pool in pools)


@given(st.fixed_dictionaries({task: st.fixed_dictionaries({"x": times, "y": times}) for task in ("a", "b")}))
def test_the_split_ends_nearly_as_early_as_the_best_one(seconds: Seconds) -> None:
    parts = [part / 50 for part in range(51)]
    every = ({"a": {"x": a, "y": 1 - a}, "b": {"x": b, "y": 1 - b}} for a, b in product(parts, parts))
    assert last_to_end(seconds, balanced(seconds)) <= 1.1 * min(last_to_end(seconds, split) for split in every)


def test_a_task_stays_on_the_pools_it_may_use_and_all_of_it_is_served() -> None:
    shares = balanced({"pinned": {"x": 5.0}, "free": {"x": 1.0, "y": 3.0}})
    assert shares["pinned"] == {"x": 1.0}
    assert sum(shares["free"].values()) == pytest.approx(1.0)
    assert shares["free"]["y"] > 0.9  # the other pool has enough to do
