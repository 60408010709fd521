"""From the rewards of groups to one advantage per trajectory. Pure Python.

Why a solved task is forgotten: a group whose members all got the same reward has no spread, so every group-relative
estimator gives it zero, and between two rare failures nothing holds the task in place. The other tasks go on moving the
shared parameters, as far as a full batch would, since Adam divides by the size of recent gradients. The solved task
drifts until it fails everywhere at once; then its groups have no spread again, and it is gone for good.

Two cures, both on by default. The learning rate is scaled by the share of groups that have spread
(`algorithm.evidence_power`), which undoes what Adam does to batches that say little; this one matters most. And a group
whose members all got the top reward keeps a small positive advantage (`algorithm.solved_advantage`): its gradient
vanishes while the policy is sure of these actions and grows when it is pushed away from them. The top is the best
reward seen for that task, once a lower one has been seen too: a task that has always failed is not solved.

An estimator is added by writing it here under `@ADVANTAGES.register`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from rollart.core.errors import RollartError
from rollart.training.registry import Registry

EPSILON = 1e-6

Groups = Sequence[Sequence[float]]
Advantage = Callable[[Groups], list[list[float]]]  # from the rewards of each group's members to their advantages

ADVANTAGES = Registry[Advantage]("training.algorithm.advantage")
_in_reward_units: set[Advantage] = set()


def in_reward_units(function: Advantage) -> Advantage:
    """Marks advantages in the units of the reward: `solved_advantage` is scaled by the range of the task's rewards."""
    _in_reward_units.add(function)
    return function


@ADVANTAGES.register
def grpo(groups: Groups) -> list[list[float]]:
    """Distance from the group's mean in its standard deviations.

    >>> [[round(a, 3) for a in group] for group in grpo([[1, 0, 0, 1], [1, 1]])]
    [[1.0, -1.0, -1.0, 1.0], [0.0, 0.0]]
    """
    return [_normalised(rewards, *_moments(rewards)) for rewards in groups]


@ADVANTAGES.register
@in_reward_units
def dr_grpo(groups: Groups) -> list[list[float]]:
    """Distance from the group's mean: not divided, so very easy and very hard groups weigh no more than others.

    >>> dr_grpo([[1, 0, 0, 1], [1, 1]])
    [[0.5, -0.5, -0.5, 0.5], [0.0, 0.0]]
    """
    return [[reward - _moments(rewards)[0] for reward in rewards] for rewards in groups]


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
    moments = _moments([reward for rewards in groups for reward in rewards])
    return [_normalised(rewards, *moments) for rewards in groups]


def _moments(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation. What is not finite stays so, for the trainer to see."""
    mean = sum(rewards) / len(rewards)
    return mean, sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def _normalised(rewards: Sequence[float], mean: float, deviation: float) -> list[float]:
    if deviation < EPSILON:
        return [0.0] * len(rewards)
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards]


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The lowest and the highest reward seen so far for a task."""

    low: float
    high: float

    def including(self, rewards: Sequence[float]) -> "RewardRange":
        finite = [reward for reward in rewards if isfinite(reward)]
        return RewardRange(min([self.low, *finite]), max([self.high, *finite]))

    def solved_by(self, rewards: Sequence[float]) -> bool:
        return self.high - self.low > EPSILON and min(rewards) > self.high - EPSILON


UNSEEN = RewardRange(float("inf"), float("-inf"))


def group_advantages(
    function: Advantage, groups: Groups, ranges: Sequence[RewardRange], solved_advantage: float
) -> tuple[list[list[float]], list[bool]]:
    """One advantage per member, and which groups are solved; `ranges` holds the range of each group's task."""
    values = [list(group) for group in function(groups)]
    if [len(group) for group in values] != [len(group) for group in groups]:
        name = getattr(function, "__name__", function)
        raise RollartError(f"the advantage {name!r} must return one number for each reward of each group")
    solved = [seen.solved_by(rewards) for rewards, seen in zip(groups, ranges, strict=True)]
    for index, seen in enumerate(ranges):
        if solved[index]:
            floor = solved_advantage * (seen.high - seen.low if function in _in_reward_units else 1.0)
            values[index] = [max(value, floor) for value in values[index]]
    return values, solved
