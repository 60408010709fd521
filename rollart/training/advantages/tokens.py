"""One advantage per action token: from the values of a critic, or from a teacher."""

import numpy as np
from numpy.typing import NDArray

from rollart.config import AlgorithmConfig
from rollart.core.errors import RollartError
from rollart.training.advantages.base import (
    ADVANTAGES,
    PlayedTokens,
    TokenGroups,
    from_teacher,
    in_reward_units,
    needs_critic,
    of_tokens,
)
from rollart.training.advantages.turns import returns

Numbers = NDArray[np.float64]


def generalised_advantages(rewards: Numbers, values: Numbers, discount: float, trace: float) -> Numbers:
    """A_t = delta_t + discount trace A_{t+1} with delta_t = r_t + discount V_{t+1} - V_t. The episode ends after the
    last step, so that nothing is worth anything there.

    >>> generalised_advantages(np.array([0.0, 1.0]), np.array([0.5, 0.25]), 1.0, 0.5).tolist()
    [0.125, 0.75]
    """
    delta = rewards + discount * np.append(values[1:], 0.0) - values
    return np.array(returns(delta.tolist(), discount * trace))


@ADVANTAGES.register
@in_reward_units
@of_tokens
@needs_critic
def gae(groups: TokenGroups, config: AlgorithmConfig) -> list[list[Numbers]]:
    """Generalised advantage estimation, over tokens or over turns (`gae_level`). The tokens of a turn share that of the
    turn."""
    return [[_gae(member, config) for member in group] for group in groups]


def _gae(member: PlayedTokens, config: AlgorithmConfig) -> Numbers:
    starts, advantages = _steps(member, config)
    return advantages[np.searchsorted(starts, np.arange(len(member.logprobs)), side="right") - 1]


def value_targets(member: PlayedTokens, config: AlgorithmConfig) -> Numbers:
    """What the critic should have said before each token: the lambda return, A + V. Not a number where a step does not
    begin: turns have one value, that of their first token."""
    assert member.values is not None
    starts, advantages = _steps(member, config)
    targets = np.full(len(member.logprobs), np.nan)
    targets[starts] = advantages + member.values[starts]
    return targets


def _steps(member: PlayedTokens, config: AlgorithmConfig) -> tuple[NDArray[np.int64], Numbers]:
    """The first token of each step of an episode, and its advantage. The reward of a turn comes with its last token;
    one without tokens belongs to the turn before."""
    assert member.values is not None
    lengths = np.array(member.lengths, np.int64)
    ends, tokens = np.cumsum(lengths), len(member.logprobs)
    starts = (ends - lengths)[lengths > 0] if config.gae_level == "turn" else np.arange(tokens)
    rewards = np.zeros(len(starts))
    if tokens:
        np.add.at(rewards, np.searchsorted(starts, np.maximum(ends - 1, 0), side="right") - 1, member.rewards)
    return starts, generalised_advantages(rewards, member.values[starts], config.discount, config.gae_lambda)


@ADVANTAGES.register
@of_tokens
@from_teacher
def opd(groups: TokenGroups, config: AlgorithmConfig) -> list[list[Numbers]]:
    """On-policy distillation: how much likelier the teacher finds each token than the policy that sampled it did. The
    expected gradient is that of KL(policy || teacher), whatever the rewards."""
    return [[_opd(member) for member in group] for group in groups]


def _opd(member: PlayedTokens) -> Numbers:
    if member.teacher is None:
        raise RollartError("the advantage 'opd' needs the logprobs of a teacher, which the samples lack")
    return member.teacher - member.logprobs
