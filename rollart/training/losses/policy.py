"""Policy losses. rho is the ratio of the current to the proximal policy, A the advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollart.training.losses.base import (
    LOSSES,
    LossInputs,
    PolicyLoss,
    corrects_itself,
    every_sample,
    one_ratio_per_sequence,
    sum_by,
)

if TYPE_CHECKING:
    from torch import Tensor


@LOSSES.register
def ppo(inputs: LossInputs) -> PolicyLoss:
    """The clipped surrogate. `clip_high` > `clip_low` is clip-higher; `dual_clip` caps a bad token's loss at
    dual_clip * |advantage|."""
    return _clipped_surrogate(inputs.ratio, inputs)


@LOSSES.register
@one_ratio_per_sequence
def gspo(inputs: LossInputs) -> PolicyLoss:
    """As PPO, with one ratio per sequence: the geometric mean of its tokens' ratios."""
    return _clipped_surrogate(_sequence_log_ratio(inputs).exp(), inputs)


@LOSSES.register
@one_ratio_per_sequence
def gspo_token(inputs: LossInputs) -> PolicyLoss:
    """GSPO whose tokens may have advantages of their own: the value of the ratio is the sequence's, the gradient the
    token's."""
    own = inputs.logprobs - inputs.logprobs.detach()
    return _clipped_surrogate((_sequence_log_ratio(inputs).detach() + own).exp(), inputs)


@LOSSES.register
def cispo(inputs: LossInputs) -> PolicyLoss:
    """REINFORCE weighted by the clipped ratio: clipping bounds a token's weight but never silences its gradient."""
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1 - inputs.config.clip_low, 1 + inputs.config.clip_high)
    return PolicyLoss(-weight * inputs.advantages * inputs.logprobs, weight != ratio)


@LOSSES.register
def reinforce(inputs: LossInputs) -> Tensor:
    """-rho A log pi, with rho as a plain weight: from the second update on the samples are those of another policy."""
    return -inputs.ratio.detach() * inputs.advantages * inputs.logprobs


@LOSSES.register
@corrects_itself
def topr(inputs: LossInputs) -> PolicyLoss:
    """Good sequences are imitated as they are; bad ones are pushed away by at most their probability over that when
    they were sampled, so that what has become unlikely is left alone."""
    log_ratio = sum_by(inputs.logprobs.detach() - inputs.engine_logprobs, inputs.sequences)[inputs.sequences]
    good = inputs.advantages > 0
    weight = log_ratio.clamp(max=0).exp().where(~good, log_ratio.new_ones(()))
    return PolicyLoss(-weight * inputs.advantages * inputs.logprobs, ~good & (log_ratio > 0))


@LOSSES.register
def raft_pp(inputs: LossInputs) -> PolicyLoss:
    """The clipped surrogate on samples with a positive advantage only."""
    result = _clipped_surrogate(inputs.ratio, inputs)
    good = inputs.advantages > 0
    return PolicyLoss(result.loss * good, result.clipped & good)


@LOSSES.register
def sapo(inputs: LossInputs) -> Tensor:
    """A smooth gate instead of a clip: -(4 / tau) sigmoid(tau (rho - 1)) A, steeper for negative advantages."""
    good, bad = inputs.config.sapo_temperatures
    tau = (inputs.advantages > 0) * (good - bad) + bad
    return -(4 / tau) * (tau * (inputs.ratio - 1)).sigmoid() * inputs.advantages


@LOSSES.register
@corrects_itself
def squared(inputs: LossInputs) -> Tensor:
    """Policy gradient with the squared log ratio to the policy that sampled as a leash (mirror descent, as Kimi's)."""
    drift = inputs.logprobs - inputs.engine_logprobs
    return -inputs.advantages * inputs.logprobs + inputs.config.beta / 2 * drift**2


@LOSSES.register
@corrects_itself
@every_sample
def sft(inputs: LossInputs) -> Tensor:
    """Cross entropy of all action tokens, whatever their advantage."""
    return -inputs.logprobs


def _sequence_log_ratio(inputs: LossInputs) -> Tensor:
    """At every token the mean of log rho over its sequence."""
    counts = inputs.sequences.bincount().clamp(min=1)
    return (sum_by(inputs.logprobs - inputs.old_logprobs, inputs.sequences) / counts)[inputs.sequences]


def _clipped_surrogate(ratio: Tensor, inputs: LossInputs) -> PolicyLoss:
    config, advantages = inputs.config, inputs.advantages
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    loss, clipped = plain.maximum(bounded), bounded > plain
    if config.dual_clip is not None:
        ceiling = -config.dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, clipped = ceiling.where(over, loss), clipped | over
    return PolicyLoss(loss, clipped)
