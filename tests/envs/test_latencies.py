import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from rollart.envs.delayed import RESET, draw
from rollart.envs.latencies import LEAST, SHORT, Latencies, quantile
from rollart.simulate.clock import run

LENGTHS = st.lists(st.floats(0.001, 1000.0), min_size=LEAST, max_size=300)


@given(LENGTHS)
def test_of_calls_that_all_ended_it_is_the_plain_quantile(lengths):
    found = quantile([(seconds, True) for seconds in lengths], 0.95)
    assert sum(seconds <= found for seconds in lengths) >= 0.95 * len(lengths) - 1e-6
    assert sum(seconds < found for seconds in lengths) < 0.95 * len(lengths) + 1e-6


@given(LENGTHS, st.integers(0, 100))
def test_a_call_that_was_given_up_never_makes_the_others_look_faster(lengths, given_up):
    calls = [(seconds, True) for seconds in lengths]
    before, after = quantile(calls, 0.95), quantile([*calls, *[(0.5, False)] * given_up], 0.95)
    assert after is None or after >= before


def test_nothing_is_known_of_few_calls_nor_while_many_are_not_over():
    few = [(1.0, True)] * (LEAST - 1)
    assert quantile(few, 0.95) is None
    assert quantile([*few, (1.0, True)], 0.95) == 1.0
    first_wave = [(n / 100, True) for n in range(50)] + [(0.5, False)] * 150
    assert quantile(first_wave, 0.95) is None


def test_if_some_never_end_the_longest_of_the_others_has_to_do():
    lost = round(100 * (0.05 + SHORT)) - 1
    assert quantile([(n / 100, True) for n in range(100 - lost)] + [(9.0, False)] * lost, 0.95) == (99 - lost) / 100


def test_giving_up_what_is_slow_again_and_again_keeps_the_estimate_where_it_was():
    """Every call is given up at the estimate, as a lost race would be: left out or taken for that length, what is slow
    would seem ever rarer or the estimate fall with every round."""

    async def main():
        rng, latencies, estimates = random.Random(1), Latencies(), []
        for _ in range(4000):
            try:
                async with asyncio.timeout(latencies.slow_after):
                    with latencies.measured():
                        await asyncio.sleep(draw(RESET, rng))
            except TimeoutError:
                pass
            if latencies.slow_after is not None:
                estimates.append(latencies.slow_after)
        return estimates

    estimates = run(main())
    assert 33.0 < min(estimates[1000:]) <= max(estimates[1000:]) < 52.0  # p90 and p98; the true p95 is 40.6
