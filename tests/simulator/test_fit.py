import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.simulator import fit
from rollart.simulator.distributions import Distribution, LogNormal, draw_of, mean_of
from rollart.simulator.measurements import MeasuredGeneration, MeasuredStep


def _drawn(distribution: Distribution, count: int = 2000) -> list[float]:
    rng = random.Random(7)
    draw = draw_of(distribution)
    return [draw(rng.random()) for _ in range(count)]


def test_a_log_normal_is_recovered_from_its_draws() -> None:
    found = fit.distribution(_drawn(Distribution(lognormal=LogNormal(median=3.8, sigma=0.64))))

    assert isinstance(found, Distribution)
    assert found.lognormal is not None
    assert found.lognormal.median == pytest.approx(3.8, rel=0.05)
    assert found.lognormal.sigma == pytest.approx(0.64, rel=0.05)


def test_two_modes_far_apart_become_a_mixture_with_their_shares() -> None:
    rng = random.Random(1)
    resets = [rng.uniform(13, 51) if rng.random() < 0.979 else rng.uniform(378, 488) for _ in range(4000)]

    found = fit.distribution(resets)

    assert isinstance(found, Distribution)
    assert found.mixture is not None
    assert [part.share for part in found.mixture] == pytest.approx([0.979, 0.021], abs=0.006)
    assert mean_of(found.mixture[1].of) == pytest.approx(433, rel=0.05)


def test_data_that_fits_no_formula_becomes_quantiles() -> None:
    rng = random.Random(3)
    found = fit.distribution([rng.choice((1.0, 2.0)) + rng.random() * 0.1 for _ in range(1000)])

    assert isinstance(found, Distribution)
    assert found.quantiles is not None


def test_a_formula_whose_largest_values_are_too_small_becomes_quantiles() -> None:
    rng = random.Random(5)
    values = [
        rng.uniform(20, 50) if rng.random() < 0.01 else 3.8 * math.exp(0.55 * rng.gauss(0, 1)) for _ in range(4000)
    ]

    found = fit.distribution(values)

    assert isinstance(found, Distribution)
    assert found.quantiles is not None
    largest = sorted(draw_of(found)((n + 0.5) / 4000) for n in range(4000))[-80:]
    assert sum(largest) == pytest.approx(sum(sorted(values)[-80:]), rel=0.05)


def test_whole_numbers_keep_their_exact_shares() -> None:
    found = fit.distribution([1.0] * 30 + [2.0] * 50 + [10.0] * 20, whole=True)

    assert isinstance(found, Distribution)
    assert found.mixture is not None
    assert [(part.of, part.share) for part in found.mixture] == [(1.0, 0.3), (2.0, 0.5), (10.0, 0.2)]


def test_equal_numbers_become_one_number_and_no_numbers_become_zero() -> None:
    assert fit.distribution([2.0, 2.001, 2.0]) == pytest.approx(2.0, rel=0.01)
    assert fit.distribution([]) == 0.0


@given(st.lists(st.floats(1e-4, 1e4), min_size=20, max_size=200))
def test_no_fit_draws_outside_the_measured_range(values: list[float]) -> None:
    draw = draw_of(fit.distribution(values))

    for at in (0.0, 0.3, 0.7, 1.0):
        assert min(values) * 0.985 <= draw(at) <= max(values) * 1.015


def test_values_that_were_cut_short_count_as_longer() -> None:
    rng = random.Random(2)
    every = [rng.expovariate(1.0) for _ in range(4000)]
    limits = [rng.uniform(0.2, 3.0) for _ in every]
    seen = [value for value, limit in zip(every, limits, strict=True) if value <= limit]
    cut = [limit for value, limit in zip(every, limits, strict=True) if value > limit]

    whole = fit.uncut(seen, cut)

    assert len(whole) == len(every)
    for at in (0.25, 0.5, 0.75, 0.9):
        assert sorted(whole)[int(at * 4000)] == pytest.approx(sorted(every)[int(at * 4000)], rel=0.1)
    assert fit.uncut([3.0, 1.0], []) == [3.0, 1.0]


def _engine_log(
    fixed: float, token: float, contention: float, trainings: list[MeasuredStep]
) -> list[MeasuredGeneration]:
    """One batch after the other, all alone: `size` sequences that prefill and then decode together."""
    rng, now, made = random.Random(5), 0.0, []
    for _ in range(400):
        size, new, tokens = rng.randint(1, 32), rng.randint(5, 60), rng.randint(2, 12)
        overlapping = any(step.began <= now < step.ended for step in trainings)
        slow = 1.0 + contention if overlapping else 1.0
        first = now + slow * (fixed + token * size * new)
        ended = first + slow * (tokens - 1) * (fixed + token * size)
        made += [MeasuredGeneration("engine-0", now, first, ended, new, tokens, new + tokens)] * size
        now = ended + 0.01
    return made


def test_the_pace_of_an_engine_is_fitted_to_its_generations() -> None:
    log = _engine_log(0.004, 0.0003, 0.0, [])
    found = fit.engine(log, fit.Crowd(log, []), chunk=4096)

    assert found.pace.fixed == pytest.approx(0.004, rel=0.05)
    assert found.pace.token == pytest.approx(0.0003, rel=0.05)
    assert found.contention == 0.0


def test_slower_passes_overlapping_training_are_contention_and_not_pace() -> None:
    trainings = [MeasuredStep(at, at + 5.0, 5.0, 100) for at in range(0, 200, 10)]
    log = _engine_log(0.004, 0.0003, 0.5, trainings)
    found = fit.engine(log, fit.Crowd(log, trainings), chunk=4096)

    assert found.contention == pytest.approx(0.5, abs=0.1)
    assert found.pace.fixed == pytest.approx(0.004, rel=0.2)


def test_training_of_one_batch_size_counts_as_proportional_to_it() -> None:
    steps = [MeasuredStep(10.0 * n, 10.0 * n + 1.25, 1.0, 1000) for n in range(6)]
    pace = fit.trainer(steps, 0.0, fit.Crowd([], steps))

    assert pace.fixed == pytest.approx(0.25)
    assert pace.token == pytest.approx(0.001)


def test_batches_of_many_sizes_reveal_the_fixed_part_of_training() -> None:
    steps = [MeasuredStep(0.0, 2.0 + n * 0.002, 2.0 + n * 0.002, n) for n in (100, 500, 1000, 2000)]
    pace = fit.trainer(steps, 0.0, fit.Crowd([], steps))

    assert pace.fixed == pytest.approx(2.0, rel=0.01)
    assert pace.token == pytest.approx(0.002, rel=0.01)


def test_training_time_that_overlaps_engines_is_corrected_for_contention() -> None:
    steps = [MeasuredStep(0.0, 1.5, 1.5, 1000)]
    crowd = fit.Crowd([MeasuredGeneration("e-0", -1.0, 0.5, 0.75, 1, 1, 2)], steps)

    alone, overlapping = fit.trainer(steps, 1.0, fit.Crowd([], steps)), fit.trainer(steps, 1.0, crowd)

    assert overlapping.token == pytest.approx(alone.token * 0.75)
    assert not math.isclose(alone.token, overlapping.token)


def test_three_processes_on_two_cores_also_share_the_cores() -> None:
    steps = [MeasuredStep(0.0, 4.0, 4.0, 1000)]
    generations = [MeasuredGeneration(f"e-{n}", 0.0, 0.5, end, 1, 2, 3) for n, end in enumerate((1.0, 2.0))]
    crowd = fit.Crowd(generations, steps, cores=2)

    shares = crowd.shares(np.array([0.0]), np.array([4.0]))

    assert shares.tolist() == [pytest.approx([0.5, 0.25, 0.25])]
    assert crowd.speed(0.2, shares).tolist() == [pytest.approx(0.5 + 0.25 / 1.2 + 0.25 / 1.7)]


def test_the_pace_of_two_engines_is_that_of_one_alone() -> None:
    alone = _engine_log(0.004, 0.0003, 0.0, [])
    both = [each._replace(engine=f"engine-{n}", began=1.5 * each.began, first=1.5 * each.first, ended=1.5 * each.ended)
            for n in range(2) for each in alone]  # fmt: skip

    found = fit.engine(both, fit.Crowd(both, [MeasuredStep(0.0, both[-1].ended, 1.0, 1)], cores=2), chunk=4096)

    assert found.contention == 0.0
    assert found.pace.fixed == pytest.approx(0.004, rel=0.05)
