import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.observe.aggregates import LastValue, MeanValue, MovingMean, QuantileSketch, Rate, RateValue

amounts = st.lists(st.tuples(st.floats(0, 200), st.floats(0, 10), st.floats(0, 40)), min_size=1, max_size=30)


def overlap(t: float, seconds: float, low: float, high: float) -> float:
    """The share of the interval that ends at `t` which lies within low..high."""
    start = max(0.0, t - seconds)
    if start == t:
        return float(low <= t <= high)
    return max(0.0, min(t, high) - max(start, low)) / (t - start)


@given(amounts)
def test_a_rate_is_the_recent_amount_over_the_recent_time(given_amounts: list[tuple[float, float, float]]) -> None:
    rate = Rate(window=30, buckets=30)
    ordered = sorted(given_amounts)
    for t, amount, seconds in ordered:
        rate.add(t, amount, seconds)
    now = ordered[-1][0]
    oldest = float(int(now) - 29)
    origin = min(max(0.0, t - seconds) for t, _, seconds in ordered)
    expected = sum(amount * overlap(t, seconds, oldest, now) for t, amount, seconds in ordered)
    assert rate.per_second(now) * max(1.0, now - max(origin, oldest)) == pytest.approx(expected, abs=1e-6)
    assert rate.total == pytest.approx(sum(amount for _, amount, _ in ordered))


def test_a_rate_forgets_what_is_older_than_its_window() -> None:
    rate = Rate(window=10, buckets=10)
    rate.add(5, 100)
    assert rate.per_second(9) > 0
    assert rate.per_second(16) == 0
    assert rate.total == 100


def test_a_rate_with_nothing_is_zero() -> None:
    assert Rate().per_second(3) == 0


def test_a_moving_mean_is_over_the_last_values_only() -> None:
    moving = MovingMean(2)
    assert moving.mean is None
    for value in (9, 1, 2):
        moving.add(value)
    assert moving.mean == 1.5


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_a_bucket_of_the_true_one(durations: list[float], share: float) -> None:
    sketch = QuantileSketch()
    for seconds in durations:
        sketch.add(seconds)
    true = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert sketch.at(share) == pytest.approx(true, rel=0.02)


def test_aggregates_differ_in_what_counts() -> None:
    rate, average, last = RateValue(), MeanValue(), LastValue()
    assert (average.recent(0), average.since_step(0), last.overall(0, 1)) == (None, None, None)
    for aggregate in (rate, average, last):
        aggregate.since_step(0.0)
        for t, value in ((1.0, 6.0), (2.0, 3.0)):
            aggregate.add(t, value, 0.0)
    assert (rate.since_step(3.0), average.since_step(3.0), last.since_step(3.0)) == (3.0, 4.5, 3.0)
    assert (rate.since_step(4.0), average.since_step(4.0), last.since_step(4.0)) == (0.0, None, 3.0)
    assert (rate.overall(9.0, 2.0), average.overall(9.0, 2.0), last.overall(9.0, 2.0)) == (4.5, 4.5, 3.0)
