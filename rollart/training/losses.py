"""Policy losses as small functions of flat tensors, one entry per action token.

Three policies meet in them. The *behaviour* policy made the token; its logprobs come from the engine and may be some
versions old. The *proximal* policy is the trainer's at the start of the step. The *current* one is being updated. In
decoupled PPO the ratio current / proximal is clipped, and proximal / behaviour is a truncated importance weight. On the
first update of a step current and proximal are the same, so the ratio is 1 in value and only its gradient counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss per token, and which tokens the clip held back."""

    loss: Tensor
    clipped: Tensor


def ppo(
    current: Tensor, proximal: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None
) -> PolicyLoss:
    """The clipped surrogate. `high` > `low` is clip-higher; `dual` caps a bad token's loss at dual * |advantage|."""
    ratio = torch.exp(current - proximal)
    return _clipped_surrogate(ratio, advantage, low, high, dual)


def gspo(
    current: Tensor,
    proximal: Tensor,
    advantage: Tensor,
    sequence: Tensor,
    low: float,
    high: float,
    dual: float | None = None,
) -> PolicyLoss:
    """As PPO, with one ratio per sequence: the geometric mean of its tokens' ratios. `sequence` indexes them from 0."""
    counts = torch.bincount(sequence).clamp(min=1).to(current.dtype)
    sums = torch.zeros_like(counts).index_add(0, sequence, current - proximal)
    ratio = torch.exp(sums / counts)[sequence]
    return _clipped_surrogate(ratio, advantage, low, high, dual)


def cispo(current: Tensor, proximal: Tensor, advantage: Tensor, low: float, high: float) -> PolicyLoss:
    """REINFORCE weighted by the clipped ratio: clipping bounds a token's weight but never silences its gradient."""
    ratio = torch.exp(current - proximal).detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return PolicyLoss(-weight * advantage * current, weight != ratio)


def reinforce(current: Tensor, advantage: Tensor) -> PolicyLoss:
    return PolicyLoss(-advantage * current, torch.zeros_like(advantage, dtype=torch.bool))


def _clipped_surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> PolicyLoss:
    plain = -ratio * advantage
    bounded = -ratio.clamp(1 - low, 1 + high) * advantage
    loss, clipped = torch.maximum(plain, bounded), bounded > plain
    if dual is not None:
        ceiling = -dual * advantage
        over = (advantage < 0) & (loss > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return PolicyLoss(loss, clipped)


def importance_weight(proximal: Tensor, behaviour: Tensor, cap: float | None) -> Tensor:
    """How much likelier the token is now than when it was made, truncated at `cap`; 1 everywhere without a cap."""
    if cap is None:
        return torch.ones_like(behaviour)
    return torch.exp(proximal.detach() - behaviour).clamp(max=cap)


def kl_to_reference(current: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(current || reference): never negative, unbiased, zero where they agree."""
    difference = reference - current
    return torch.exp(difference) - difference - 1


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
