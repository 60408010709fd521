import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_sample

from rollart.config import AlgorithmConfig
from rollart.core.types import Batch, Sample, SampleGroup, TurnSpan
from rollart.training.advantages import (
    ADVANTAGES,
    UNSEEN,
    Advantage,
    Groups,
    PlayedTurns,
    RewardRange,
    in_reward_units,
    of_turns,
    token_advantages,
)
from rollart.training.advantages.credit import members_of, shaped_rewards
from rollart.training.advantages.groups import dr_grpo, grpo, maxrl, reinforce_pp, reinforce_pp_baseline, rloo
from rollart.training.advantages.turns import gigpo, turn_returns

GROUPS = [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5]]
SEEN = RewardRange(0.0, 1.0)


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
def test_reinforce_pp_baseline_and_maxrl_are_their_plain_formulas(groups: list[list[float]]) -> None:
    means = [float(np.mean(group)) for group in groups]
    centred = np.concatenate([np.array(group) - mean for group, mean in zip(groups, means, strict=True)])
    flat = [value for group in reinforce_pp_baseline(groups) for value in group]
    scale = centred.std() + 1e-6 if centred.std() > 1e-6 else math.inf
    assert flat == pytest.approx(list((centred - centred.mean()) / scale), abs=1e-6)
    for rewards, mean, values in zip(groups, means, maxrl(groups), strict=True):
        if abs(mean) > 1e-3:
            assert values == pytest.approx([(reward - mean) / mean for reward in rewards], rel=1e-6, abs=1e-6)


@given(REWARDS)
def test_the_advantages_of_a_group_sum_to_zero(groups: list[list[float]]) -> None:
    for estimator in (grpo, dr_grpo, rloo, reinforce_pp_baseline):
        for group in estimator(groups):
            assert sum(group) == pytest.approx(0.0, abs=1e-3)


@given(REWARDS)
def test_the_order_of_rewards_is_the_order_of_advantages(groups: list[list[float]]) -> None:
    for estimator in (grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline):
        for rewards, values in zip(groups, estimator(groups), strict=True):
            ranked = [value for _, value in sorted(zip(rewards, values, strict=True))]
            assert ranked == sorted(ranked) or ranked == pytest.approx(sorted(ranked), abs=1e-9)


def played(*rewards: float, states: str = "") -> PlayedTurns:
    names = states or "".join(chr(ord("a") + number) for number in range(len(rewards)))
    turns = tuple(TurnSpan(n, 0, 0, state=state) for n, state in enumerate(names))
    return PlayedTurns(turns, rewards)


def test_turn_returns_by_hand() -> None:
    # discounted by a half: returns (0.5, 1) and (0, 0); the means at the two turns are 0.25 and 0.5
    ((good, bad),) = turn_returns([[played(0.0, 1.0), played(0.0, 0.0)]], AlgorithmConfig(discount=0.5))
    deviation = float(np.std([0.5, 1.0, 0.0, 0.0])) + 1e-6
    assert good == pytest.approx([0.25 / deviation, 0.5 / deviation])
    assert bad == pytest.approx([-0.25 / deviation, -0.5 / deviation])


def test_a_turn_that_one_member_reached_is_compared_with_all_turns_of_the_group() -> None:
    ((long, short),) = turn_returns([[played(0.0, 1.0), played(0.0)]], AlgorithmConfig())
    values = [1.0, 1.0, 0.0]
    deviation, mean = float(np.std(values)) + 1e-6, float(np.mean(values))
    assert long == pytest.approx([0.5 / deviation, (1 - mean) / deviation])
    assert short == pytest.approx([-0.5 / deviation])


def test_gigpo_by_hand() -> None:
    # Both begin in x. The first goes on to y, the second to z, which nobody else saw.
    group = [played(0.0, 1.0, states="xy"), played(0.0, 0.0, states="xz")]
    ((good, bad),) = gigpo([group], AlgorithmConfig(step_weight=0.5))
    assert good == pytest.approx([1.0 + 0.5, 1.0], abs=1e-4)
    assert bad == pytest.approx([-1.0 - 0.5, -1.0], abs=1e-4)


def test_gigpo_tells_turns_of_one_state_apart_where_episodes_end_alike() -> None:
    """Both episodes got 1, one of them later: discounted, the turn that led there sooner is better."""
    group = [played(1.0, 0.0, states="xy"), played(0.0, 1.0, states="xy")]
    ((early, late),) = gigpo([group], AlgorithmConfig(discount=0.5))
    assert early[0] > 0 > late[0]


def sample(reward: float, name: str, *, turns: int = 2, truncated: bool = False, length: int = 12) -> Sample:
    made = replace(make_sample(reward, random.Random(0), length=length), id=name, truncated=truncated)
    spans = (TurnSpan(0, 3, 5, reward=0.0), TurnSpan(1, 7, length, reward=0.25))
    return replace(made, turns=spans[:turns])


def tokens(
    function: Advantage, groups: list[list[Sample]], **keys: object
) -> tuple[list[list[list[float]]], list[bool]]:
    batch = Batch(0, tuple(SampleGroup(str(n), "t", tuple(group)) for n, group in enumerate(groups)))
    config = AlgorithmConfig.model_validate(keys)
    values, solved = token_advantages(function, batch, [SEEN] * len(groups), config)
    return [[[round(float(x), 5) for x in row] for row in group] for group in values], solved


def test_every_token_of_a_trajectory_has_its_advantage() -> None:
    values, _ = tokens(grpo, [[sample(1.0, "a"), sample(0.0, "b", length=9)]])
    assert values == [[[1.0] * 7, [-1.0] * 4]] or values[0][0] == pytest.approx([1.0] * 7, abs=1e-4)
    assert [len(row) for row in values[0]] == [7, 4]


def test_the_last_turn_gets_what_the_reward_function_added() -> None:
    (member,) = members_of(SampleGroup("g", "t", (sample(1.0, "a"),)))
    assert member.played(1.0).rewards == (0.0, 1.0)


def test_turns_spread_over_their_own_tokens_also_across_segments() -> None:
    first = replace(sample(1.0, "a"), turns=(TurnSpan(0, 3, 5), TurnSpan(2, 7, 12)))
    second = replace(sample(1.0, "a/1", turns=1), trajectory="a", turns=(TurnSpan(1, 3, 5), TurnSpan(3, 7, 12)))

    def numbered(groups: object, config: object) -> list[list[list[float]]]:
        return [[[0.0, 1.0, 2.0, 3.0]]]

    values, _ = tokens(of_turns(numbered), [[first, second]], solved_advantage=0)
    assert values == [[[0.0] * 2 + [2.0] * 5, [1.0] * 2 + [3.0] * 5]]


def test_a_solved_group_keeps_a_small_advantage() -> None:
    groups = [[sample(r, f"{n}{m}", length=8) for m, r in enumerate(row)] for n, row in enumerate([[1, 1], [0, 0]])]
    values, solved = tokens(grpo, groups)
    assert values[0] == [[0.15] * 3] * 2 and values[1] == [[0.0] * 3] * 2
    assert solved == [True, False]


def test_a_task_that_never_differed_is_not_solved() -> None:
    assert not UNSEEN.including([0.0, 0.0]).solved_by([0.0, 0.0])


def test_the_solved_advantage_is_in_reward_units_where_the_estimator_is() -> None:
    def plain(groups: Groups) -> list[list[float]]:
        return [[0.0 for _ in rewards] for rewards in groups]

    batch = Batch(0, (SampleGroup("g", "t", (sample(10.0, "a"),)),))
    seen = [RewardRange(-10.0, 10.0)]
    for function, expected in ((plain, 0.15), (in_reward_units(lambda groups: plain(groups)), 3.0), (dr_grpo, 3.0)):
        values, _ = token_advantages(function, batch, seen, AlgorithmConfig())
        assert values[0][0].tolist() == pytest.approx([expected] * 7)


def test_solved_never_lowers_an_advantage() -> None:
    groups = [[sample(1.0, "a"), sample(1.0, "b")], [sample(0.0, "c"), sample(0.0, "d")]]
    values, _ = tokens(reinforce_pp, groups)
    assert values[0][0] == pytest.approx([1.0] * 7, abs=1e-4)


def test_a_reward_that_is_not_finite_does_not_enter_the_range() -> None:
    assert UNSEEN.including([math.nan, 1.0, math.inf, 0.0]) == RewardRange(0.0, 1.0)


def test_normalising_by_batch_makes_dr_grpo_the_baseline_of_reinforce_pp() -> None:
    groups = [[sample(1.0, "a"), sample(0.0, "b")], [sample(0.2, "c"), sample(0.0, "d")]]
    assert tokens(dr_grpo, groups, normalise="batch") == tokens(reinforce_pp_baseline, groups)


def test_normalising_by_group_makes_dr_grpo_grpo() -> None:
    groups = [[sample(1.0, "a"), sample(0.0, "b")], [sample(0.2, "c"), sample(0.0, "d")]]
    assert tokens(dr_grpo, groups, normalise="group") == tokens(grpo, groups)


def test_advantages_are_clipped_on_both_sides() -> None:
    groups = [[sample(1.0, "a"), *(sample(0.0, f"b{n}") for n in range(8))]]
    values, _ = tokens(maxrl, groups, clip_advantage=0.5)
    assert {x for row in values[0] for x in row} == {0.5, -0.5}


def test_truncated_trajectories_are_left_out_if_asked() -> None:
    groups = [[sample(1.0, "a"), sample(0.0, "b", truncated=True)]]
    assert any(tokens(grpo, groups)[0][0][1])
    assert not any(tokens(grpo, groups, mask_truncated=True)[0][0][1])
    assert any(tokens(grpo, groups, mask_truncated=True)[0][0][0])


def test_length_costs_reward() -> None:
    group = SampleGroup("g", "t", (sample(1.0, "a", length=8), sample(1.0, "b", length=18), sample(0.0, "c", length=8)))
    members = members_of(group)
    # the longest of the right ones loses a half of the penalty, the shortest wins it; a wrong one wins nothing
    assert shaped_rewards(members, AlgorithmConfig(length_penalty=0.2)) == pytest.approx([1.1, 0.9, 0.0])
    # 3, 13 and 3 action tokens; what is above 8 costs up to 1 over 10 tokens
    assert shaped_rewards(members, AlgorithmConfig(overlong_tokens=8, overlong_buffer=10)) == [1.0, 0.5, 0.0]


def test_an_estimator_of_the_wrong_shape_is_named() -> None:
    with pytest.raises(Exception, match="must return one number for each reward of each group"):
        tokens(lambda groups: [[0.0]], [[sample(1.0, "a"), sample(0.0, "b")]])


def test_the_estimators_that_ship() -> None:
    assert set(ADVANTAGES.names()) == {
        *("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl"),
        *("turn_returns", "gigpo", "gae", "opd"),
    }
