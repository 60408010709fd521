import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.observe.windows import Moving, Rate

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
    moving = Moving(2)
    assert moving.mean is None
    for value in (9, 1, 2):
        moving.add(value)
    assert moving.mean == 1.5
