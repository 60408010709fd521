"""What an estimator of advantages gets and returns, and the table of estimators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rollart.config import AlgorithmConfig
from rollart.core.types import TurnSpan
from rollart.training.registry import Registry

EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class PlayedTurns:
    """A trajectory as estimators of turns see it. `rewards` has one for each turn; together they are the trajectory's
    reward: what the reward function gave beyond the environment's rewards is in the last."""

    turns: tuple[TurnSpan, ...]
    rewards: tuple[float, ...]


Rewards = Sequence[float]
Groups = Sequence[Rewards]
TurnGroups = Sequence[Sequence[PlayedTurns]]
# From the rewards of each group's members to their advantages; or, marked with @of_turns, from the turns of each
# member and the config to one advantage per turn.
Advantage = Callable[..., Any]

ADVANTAGES = Registry[Advantage]("training.algorithm.advantage")
reward_units: set[Advantage] = set()
turn_estimators: set[Advantage] = set()


def in_reward_units(function: Advantage) -> Advantage:
    """Marks advantages in the units of the reward: `solved_advantage` is scaled by the range of the task's rewards."""
    reward_units.add(function)
    return function


def of_turns(function: Callable[[TurnGroups, AlgorithmConfig], list[list[list[float]]]]) -> Advantage:
    """Marks an estimator that gives each turn an advantage of its own."""
    turn_estimators.add(function)
    return function


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The lowest and the highest reward seen so far for a task."""

    low: float
    high: float

    def including(self, rewards: Rewards) -> "RewardRange":
        finite = [reward for reward in rewards if isfinite(reward)]
        return RewardRange(min([self.low, *finite]), max([self.high, *finite]))

    def solved_by(self, rewards: Rewards) -> bool:
        return self.high - self.low > EPSILON and min(rewards) > self.high - EPSILON


UNSEEN = RewardRange(float("inf"), float("-inf"))
