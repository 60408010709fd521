"""What an estimator of advantages gets and returns, and the table of estimators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class PlayedTokens:
    """A trajectory as estimators of tokens see it. `lengths` are the action tokens of each turn, `rewards` as those of
    `PlayedTurns`; the columns have an entry for every action token, turn after turn: the logprob by the policy that
    sampled it, the critic's value of what came before it, and the teacher's logprob."""

    lengths: tuple[int, ...]
    rewards: tuple[float, ...]
    logprobs: NDArray[np.float64]
    values: NDArray[np.float64] | None = None
    teacher: NDArray[np.float64] | None = None


Rewards = Sequence[float]
Groups = Sequence[Rewards]
TurnGroups = Sequence[Sequence[PlayedTurns]]
TokenGroups = Sequence[Sequence[PlayedTokens]]
# From the rewards of each group's members to their advantages; or, marked with @of_turns or @of_tokens, from the turns
# or tokens of each member and the config to one advantage for each of these.
Advantage = Callable[..., Any]

ADVANTAGES = Registry[Advantage]("training.algorithm.advantage")
reward_units: set[Advantage] = set()
turn_estimators: set[Advantage] = set()
token_estimators: set[Advantage] = set()
critic_estimators: set[Advantage] = set()
teacher_estimators: set[Advantage] = set()


def of_whole_trajectories(function: Advantage) -> bool:
    """Whether it needs nothing but the rewards of groups."""
    return function not in turn_estimators | token_estimators


def in_reward_units(function: Advantage) -> Advantage:
    """Marks advantages in the units of the reward: `solved_advantage` is scaled by the range of the task's rewards."""
    reward_units.add(function)
    return function


def of_turns(function: Callable[[TurnGroups, AlgorithmConfig], list[list[list[float]]]]) -> Advantage:
    """Marks an estimator that gives each turn an advantage of its own."""
    turn_estimators.add(function)
    return function


def of_tokens(function: Callable[[TokenGroups, AlgorithmConfig], list[list[NDArray[np.float64]]]]) -> Advantage:
    """Marks an estimator that gives each action token an advantage of its own."""
    token_estimators.add(function)
    return function


def needs_critic(function: Advantage) -> Advantage:
    """Marks an estimator of tokens that uses the values of a critic, which is then trained beside the policy."""
    critic_estimators.add(function)
    return function


def from_teacher(function: Advantage) -> Advantage:
    """Marks an estimator of tokens that looks at a teacher's logprobs and at no reward: no group of it is solved."""
    teacher_estimators.add(function)
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
