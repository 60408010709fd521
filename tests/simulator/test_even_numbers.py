from itertools import islice
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.simulator.environments import even_numbers


def _numbers(start: float, per_batch: float, one_in: int, count: int) -> list[float]:
    return list(islice(iter(even_numbers(start, per_batch, one_in), None), count))


@given(st.floats(0, 1), st.integers(20, 400), st.integers(0, 300))
def test_any_stretch_of_them_is_spread_evenly(start: float, count: int, skipped: int) -> None:
    numbers = sorted(_numbers(start, 1e9, 1, skipped + count)[skipped:])

    assert all(abs(number - n / count) < 5 / count for n, number in enumerate(numbers))


@given(st.floats(0, 1), st.floats(0.1, 500), st.integers(2, 16))
def test_all_are_within_0_and_1(start: float, per_batch: float, one_in: int) -> None:
    assert all(0 <= number <= 1 for number in _numbers(start, per_batch, one_in, 300))


@pytest.mark.parametrize("one_in", [2, 8])
def test_the_largest_of_a_batch_is_almost_as_large_as_that_of_the_whole(one_in: int) -> None:
    batch = 50
    numbers = _numbers(0.3, batch, one_in, 400 * batch)
    largest = [max(numbers[n : n + batch]) for n in range(0, len(numbers), batch)]

    expected = 1 / (one_in * batch + 1)  # what the largest of that many random numbers lacks to 1
    assert 0.7 * expected < fmean(1 - each for each in largest) < 2 * expected  # a batch here and there has none
    assert fmean(numbers) == pytest.approx(0.5, abs=0.01)
