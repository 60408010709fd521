import asyncio
import random

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fault_injection import RESET_QUANTILES, draw
from rollart.envs.latencies import MIN_CALLS, Latencies, quantile
from rollart.simulator.clock import run

LENGTHS = st.lists(st.floats(1.0, 4.0), min_size=MIN_CALLS, max_size=300)


@given(LENGTHS)
def test_for_ordinary_calls_that_all_ended_it_is_the_plain_quantile(lengths):
    found = quantile([(seconds, True) for seconds in lengths], 0.95)
    assert sum(seconds <= found for seconds in lengths) >= 0.95 * len(lengths) - 1e-6
    assert sum(seconds < found for seconds in lengths) < 0.95 * len(lengths) + 1e-6


def test_calls_of_a_second_mode_do_not_move_the_quantile_whether_they_ended_or_were_given_up():
    ordinary = [(1 + n / 1000, True) for n in range(960)]
    wanted = quantile(ordinary, 0.95)
    for rare in [(400.0, True)] * 40, [(2.5, False)] * 40, [(400.0, True)] * 20 + [(3.0, False)] * 20:
        assert quantile([*ordinary, *rare], 0.95) == wanted


@given(LENGTHS, st.integers(0, 100))
def test_a_call_that_was_given_up_never_makes_the_others_look_faster(lengths, given_up):
    calls = [(seconds, True) for seconds in lengths]
    before, after = quantile(calls, 0.95), quantile([*calls, *[(0.5, False)] * given_up], 0.95)
    assert after is None or after >= before


def test_there_is_no_estimate_from_few_calls_nor_while_many_have_not_ended():
    few = [(1.0, True)] * (MIN_CALLS - 1)
    assert quantile(few, 0.95) is None
    assert quantile([*few, (1.0, True)], 0.95) == 1.0
    first_wave = [(n / 100, True) for n in range(50)] + [(0.5, False)] * 150
    assert quantile(first_wave, 0.95) is None


def test_more_than_a_few_calls_that_do_not_end_leave_no_estimate():
    ends = [(1 + n / 1000, True) for n in range(900)]
    assert quantile([*ends, *[(9.0, False)] * 90], 0.95) is not None
    assert quantile([*ends, *[(9.0, False)] * 110], 0.95) is None


def test_giving_up_what_is_slow_again_and_again_keeps_the_estimate_where_it_was():
    """Every call is given up at the estimate, as a lost race would be: left out or taken for that length, what is slow
    would seem ever rarer or the estimate fall with every round."""

    async def main():
        rng, latencies, estimates = random.Random(1), Latencies(0.95), []
        for _ in range(4000):
            try:
                async with asyncio.timeout(latencies.slow_after):
                    with latencies.measured():
                        await asyncio.sleep(draw(RESET_QUANTILES, rng))
            except TimeoutError:
                pass
            if latencies.slow_after is not None:
                estimates.append(latencies.slow_after)
        return estimates

    estimates = run(main())
    assert 33.0 < min(estimates[1000:]) <= max(estimates[1000:]) < 52.0  # p90 and p98; of ordinary ones the p95 is 38.6
