"""Losses of pairs: sequences 2k and 2k + 1 of a micro-batch, of which the one with the larger advantage is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollart.core.errors import RollartError
from rollart.training.losses.base import LOSSES, LossInputs, PolicyLoss, needs_reference, of_pairs, of_scores, sum_by

if TYPE_CHECKING:
    from torch import Tensor


@LOSSES.register
@of_pairs
@needs_reference
def dpo(inputs: LossInputs) -> PolicyLoss:
    """-log sigmoid(beta margin)."""
    values = inputs.config.beta * margins(inputs)
    return _over_tokens(values.new_zeros(()).logaddexp(-values), values, inputs)


@LOSSES.register
@of_pairs
@needs_reference
def ipo(inputs: LossInputs) -> PolicyLoss:
    """(margin - 1 / (2 beta))^2, with log ratios averaged over the tokens of a sequence."""
    values = margins(inputs, mean=True)
    return _over_tokens((values - 1 / (2 * inputs.config.beta)) ** 2, values, inputs)


@LOSSES.register
@of_scores
def bradley_terry(inputs: LossInputs) -> PolicyLoss:
    """-log sigmoid(score of the chosen - score of the rejected): a reward model's, whose scores are in place of
    logprobs, one for each sequence."""
    values = _chosen_less_rejected(sum_by(inputs.logprobs, inputs.sequences), inputs)
    return _over_tokens(values.new_zeros(()).logaddexp(-values), values, inputs)


def margins(inputs: LossInputs, *, mean: bool = False) -> Tensor:
    """By how much the log ratio to the reference of the chosen sequence exceeds that of the rejected, for each pair."""
    if inputs.reference_logprobs is None:
        raise RollartError(f"the loss {inputs.config.loss!r} needs the logprobs of the reference")
    ratios = sum_by(inputs.logprobs - inputs.reference_logprobs, inputs.sequences)
    if mean:
        ratios = ratios / inputs.sequences.bincount().clamp(min=1)
    return _chosen_less_rejected(ratios, inputs)


def _chosen_less_rejected(values: Tensor, inputs: LossInputs) -> Tensor:
    """Of each pair, from one value for each sequence."""
    if len(values) % 2:
        raise RollartError(f"the loss {inputs.config.loss!r} needs pairs, but a pass has {len(values)} sequences")
    advantages = sum_by(inputs.advantages, inputs.sequences)
    sign = (advantages[0::2] - advantages[1::2]).sign()
    return sign * (values[0::2] - values[1::2])


def _over_tokens(losses: Tensor, margins: Tensor, inputs: LossInputs) -> PolicyLoss:
    """The loss of a pair at all its tokens: the mean over sequences (`aggregate: sequence`) is that over pairs."""
    loss = losses.repeat_interleave(2)[inputs.sequences]
    return PolicyLoss(loss, loss.new_zeros(loss.shape).bool(), margins.detach())
