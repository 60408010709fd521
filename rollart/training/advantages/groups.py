"""From the rewards of groups to one advantage per trajectory."""

from math import sqrt

from rollart.training.advantages.base import ADVANTAGES, EPSILON, Groups, Rewards, in_reward_units


@ADVANTAGES.register
def grpo(groups: Groups) -> list[list[float]]:
    """Distance from the group's mean in its standard deviations.

    >>> [[round(a, 3) for a in group] for group in grpo([[1, 0, 0, 1], [1, 1]])]
    [[1.0, -1.0, -1.0, 1.0], [0.0, 0.0]]
    """
    return [normalised(rewards, *moments(rewards)) for rewards in groups]


@ADVANTAGES.register
@in_reward_units
def dr_grpo(groups: Groups) -> list[list[float]]:
    """Distance from the group's mean: not divided, so very easy and very hard groups weigh no more than others.

    >>> dr_grpo([[1, 0, 0, 1], [1, 1]])
    [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0]]
    """
    return [[reward - moments(rewards)[0] for reward in rewards] for rewards in groups]


@ADVANTAGES.register
@in_reward_units
def rloo(groups: Groups) -> list[list[float]]:
    """Distance from the mean of the other members; a group of one has no others and gives zero.

    >>> rloo([[1, 0, 0], [1]])
    [[1.0, -0.5, -0.5], [0.0]]
    """
    scales = [len(rewards) / max(1, len(rewards) - 1) for rewards in groups]
    return [[scale * value for value in values] for scale, values in zip(scales, dr_grpo(groups), strict=True)]


@ADVANTAGES.register
def reinforce_pp(groups: Groups) -> list[list[float]]:
    """REINFORCE++: distance from the mean of the whole batch in its standard deviations.

    >>> [[round(a, 3) for a in group] for group in reinforce_pp([[1, 1], [0, 0]])]
    [[1.0, 1.0], [-1.0, -1.0]]
    """
    whole = moments([reward for rewards in groups for reward in rewards])
    return [normalised(rewards, *whole) for rewards in groups]


@ADVANTAGES.register
def reinforce_pp_baseline(groups: Groups) -> list[list[float]]:
    """REINFORCE++ with a baseline: distance from the group's mean, in standard deviations of the batch.

    >>> [[round(a, 3) for a in group] for group in reinforce_pp_baseline([[1, 0], [1, 1]])]
    [[1.414, -1.414], [0.0, 0.0]]
    """
    values: list[list[float]] = reinforce_pp(dr_grpo(groups))
    return values


@ADVANTAGES.register
def maxrl(groups: Groups) -> list[list[float]]:
    """Distance from the group's mean, over that mean: rare successes count most. For rewards that are not negative.

    >>> maxrl([[1, 0, 0, 0], [1, 1], [0, 0]])
    [[3.0, -1.0, -1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]
    """
    return [
        [(reward - mean) / mean if abs(mean) > EPSILON else 0.0 for reward in rewards]
        for rewards, (mean, _) in ((rewards, moments(rewards)) for rewards in groups)
    ]


def moments(rewards: Rewards) -> tuple[float, float]:
    """Mean and standard deviation. What is not finite stays so, for the trainer to see."""
    mean = sum(rewards) / len(rewards)
    return mean, sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def normalised(rewards: Rewards, mean: float, deviation: float) -> list[float]:
    if deviation < EPSILON:
        return [0.0] * len(rewards)
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]
