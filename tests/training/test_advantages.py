import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.training.advantages import (
    UNSEEN,
    Groups,
    RewardRange,
    dr_grpo,
    group_advantages,
    grpo,
    in_reward_units,
    reinforce_pp,
    rloo,
)

GROUPS = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5]]


def test_grpo_by_hand() -> None:
    # mean 1/4, variance 3/16
    deviation = math.sqrt(3) / 4
    expected = [0.75 / deviation, -0.25 / deviation, -0.25 / deviation, -0.25 / deviation]
    assert grpo(GROUPS)[0] == pytest.approx(expected, rel=1e-5)
    assert grpo(GROUPS)[1] == [0.0, 0.0]


def test_dr_grpo_by_hand() -> None:
    assert dr_grpo(GROUPS) == [[0.75, -0.25, -0.25, -0.25], [0.0, 0.0]]


def test_rloo_by_hand() -> None:
    # the others of the first member average 0, those of each other member 1/3
    assert rloo(GROUPS)[0] == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert rloo([[0.7]]) == [[0.0]]


def test_reinforce_pp_by_hand() -> None:
    # over the batch: mean 1/3, mean square 1.5/6, variance 1/4 - 1/9 = 5/36
    deviation = math.sqrt(5) / 6
    expected = [[(r - 1 / 3) / deviation for r in group] for group in GROUPS]
    for values, hand in zip(reinforce_pp(GROUPS), expected, strict=True):
        assert values == pytest.approx(hand, rel=1e-5)


REWARDS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=5)


@given(REWARDS)
def test_the_advantages_of_a_group_sum_to_zero(groups: list[list[float]]) -> None:
    for estimator in (grpo, dr_grpo, rloo):
        for group in estimator(groups):
            assert sum(group) == pytest.approx(0.0, abs=1e-3)


@given(REWARDS, st.floats(0.5, 100), st.floats(-10, 10))
def test_the_order_of_rewards_is_the_order_of_advantages(groups: list[list[float]], scale: float, shift: float) -> None:
    for estimator in (grpo, dr_grpo, rloo, reinforce_pp):
        for rewards, values in zip(groups, estimator(groups), strict=True):
            ranked = [value for _, value in sorted(zip(rewards, values, strict=True))]
            assert ranked == sorted(ranked) or ranked == pytest.approx(sorted(ranked), abs=1e-9)


def test_a_solved_group_keeps_a_small_advantage() -> None:
    seen = RewardRange(0.0, 1.0)
    values, solved = group_advantages(grpo, [[1.0, 1.0], [0.0, 0.0], [0.5, 0.5]], [seen] * 3, 0.15)
    assert values == [[0.15, 0.15], [0.0, 0.0], [0.0, 0.0]]
    assert solved == [True, False, False]


def test_a_task_that_never_differed_is_not_solved() -> None:
    always_zero = UNSEEN.including([0.0, 0.0])
    assert group_advantages(grpo, [[0.0, 0.0]], [always_zero], 0.15) == ([[0.0, 0.0]], [False])


def test_the_solved_advantage_is_in_reward_units_where_the_estimator_is() -> None:
    seen = RewardRange(-10.0, 10.0)
    values, _ = group_advantages(dr_grpo, [[10.0, 10.0]], [seen], 0.15)
    assert values[0] == pytest.approx([3.0, 3.0])


def test_own_advantages_are_in_reward_units_if_marked() -> None:
    def plain(groups: Groups) -> list[list[float]]:
        return [[0.0 for _ in rewards] for rewards in groups]

    seen = RewardRange(-10.0, 10.0)
    assert group_advantages(plain, [[10.0]], [seen], 0.15)[0] == [[0.15]]
    assert group_advantages(in_reward_units(plain), [[10.0]], [seen], 0.15)[0] == [[3.0]]


def test_solved_never_lowers_an_advantage() -> None:
    seen = RewardRange(0.0, 1.0)
    values, _ = group_advantages(reinforce_pp, [[1.0, 1.0], [0.0, 0.0]], [seen] * 2, 0.15)
    assert values[0] == pytest.approx([1.0, 1.0], abs=1e-4)


def test_a_reward_that_is_not_finite_does_not_enter_the_range() -> None:
    assert UNSEEN.including([math.nan, 1.0, math.inf, 0.0]) == RewardRange(0.0, 1.0)
