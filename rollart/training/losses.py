"""Policy losses: small functions of flat tensors with one entry per action token.

Three policies meet in them. The *behaviour* policy sampled the token; its logprobs come from the engine and may be some
versions old. The *proximal* policy is the trainer's at the start of the step. The *current* one is being updated. In
decoupled PPO the ratio current / proximal is clipped, and proximal / behaviour is a truncated importance weight. On the
first update of a step current and proximal are the same, so the ratio is 1 in value and only its gradient counts.

A loss is added by writing it here under `@LOSSES.register`. `rollart check` reads the registry, so this module does not
import torch: the methods of tensors are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollart.config import AlgorithmConfig
from rollart.core.errors import RollartError
from rollart.training.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The action tokens of one micro-batch; there are no others, so there is no mask.

    `logprobs` are the current policy's and carry the gradient; `old_logprobs` are the proximal policy's and
    `engine_logprobs` the behaviour policy's. `sequences` numbers the sequence of each token from 0.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    config: AlgorithmConfig


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss per token, and which tokens were clipped."""

    loss: Tensor
    clipped: Tensor


Loss = Callable[[LossInputs], "Tensor | PolicyLoss"]
LOSSES = Registry[Loss]("training.algorithm.loss")


def policy_loss(function: Loss, inputs: LossInputs) -> PolicyLoss:
    """The loss of every token. Without tokens, as on a rank that has nothing in a pass, `function` is not called."""
    empty = inputs.logprobs.numel() == 0
    result = inputs.logprobs if empty else function(inputs)
    if not isinstance(result, PolicyLoss):
        result = PolicyLoss(result, inputs.logprobs.new_zeros(inputs.logprobs.shape).bool())
    if result.loss.shape != inputs.logprobs.shape:
        raise RollartError(
            f"the loss {inputs.config.loss!r} must return one value per token, a tensor of shape "
            f"{tuple(inputs.logprobs.shape)}, not {tuple(result.loss.shape)}"
        )
    return result


@LOSSES.register
def ppo(inputs: LossInputs) -> PolicyLoss:
    """The clipped surrogate. `clip_high` > `clip_low` is clip-higher; `dual_clip` caps a bad token's loss at
    dual_clip * |advantage|."""
    return _clipped_surrogate((inputs.logprobs - inputs.old_logprobs).exp(), inputs)


@LOSSES.register
def gspo(inputs: LossInputs) -> PolicyLoss:
    """As PPO, with one ratio per sequence: the geometric mean of its tokens' ratios."""
    counts = inputs.sequences.bincount().clamp(min=1).to(inputs.logprobs.dtype)
    sums = counts.new_zeros(counts.shape).index_add(0, inputs.sequences, inputs.logprobs - inputs.old_logprobs)
    return _clipped_surrogate((sums / counts).exp()[inputs.sequences], inputs)


@LOSSES.register
def cispo(inputs: LossInputs) -> PolicyLoss:
    """REINFORCE weighted by the clipped ratio: clipping bounds a token's weight but never silences its gradient."""
    ratio = (inputs.logprobs - inputs.old_logprobs).exp().detach()
    weight = ratio.clamp(1 - inputs.config.clip_low, 1 + inputs.config.clip_high)
    return PolicyLoss(-weight * inputs.advantages * inputs.logprobs, weight != ratio)


@LOSSES.register
def reinforce(inputs: LossInputs) -> Tensor:
    return -inputs.advantages * inputs.logprobs


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


def importance_weight(proximal: Tensor, behaviour: Tensor, cap: float | None) -> Tensor:
    """How much likelier the token is now than when it was made, truncated at `cap`; 1 everywhere without a cap."""
    if cap is None:
        return behaviour.new_ones(behaviour.shape)
    return (proximal.detach() - behaviour).exp().clamp(max=cap)


def kl_to_reference(current: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(current || reference): never negative, unbiased, zero where they agree."""
    difference = reference - current
    return difference.exp() - difference - 1


def token_weights(
    lengths: Sequence[int], groups: Sequence[int], aggregate: str, sequences: Sequence[int] | None = None
) -> list[float]:
    """The weight of each token of every sequence, so that the loss of a batch is the weighted sum over its tokens.

    `token` is the mean over all tokens, `sequence` the mean over sequences of their means, `group` the mean over groups
    of the mean over their tokens. `lengths` counts action tokens, `groups` names each one's group and `sequences`,
    where a sequence is in several pieces, what each is a piece of.

    >>> token_weights([1, 3, 4], [0, 0, 1], "token")
    [0.125, 0.125, 0.125]
    >>> token_weights([1, 3, 4], [0, 0, 1], "group")
    [0.125, 0.125, 0.125]
    >>> token_weights([1, 3, 4], [0, 0, 1], "sequence", sequences=[0, 0, 1])
    [0.125, 0.125, 0.125]
    """
    if aggregate == "token":
        return [1 / max(1, sum(lengths))] * len(lengths)
    owners = groups if aggregate == "group" else range(len(lengths)) if sequences is None else sequences
    totals: dict[int, int] = {}
    for owner, length in zip(owners, lengths, strict=True):
        totals[owner] = totals.get(owner, 0) + length
    return [1 / (len(totals) * max(1, totals[owner])) for owner in owners]
