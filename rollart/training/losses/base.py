"""What a loss gets and returns, and the table of losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rollart.config import AlgorithmConfig
from rollart.core.errors import RollartError
from rollart.training.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The action tokens of one micro-batch; there are no others, so there is no mask.

    `logprobs` are the current policy's and carry the gradient; `old_logprobs` are the proximal policy's and
    `engine_logprobs` the behaviour policy's. `sequences` numbers the sequence of each token from 0. The rest is there
    if a loss needs it: the reference's logprobs, the teacher's, and for each token the logprobs of the teacher's
    likeliest tokens, by the policy (with gradient) and by the teacher, [tokens, count].
    """

    logprobs: Tensor
    old_logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    config: AlgorithmConfig
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    teacher_top_logprobs: Tensor | None = None

    @property
    def ratio(self) -> Tensor:
        """Current over proximal policy."""
        return (self.logprobs - self.old_logprobs).exp()


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss per token, and which tokens were clipped. Of pairs, by how much each chosen sequence is preferred."""

    loss: Tensor
    clipped: Tensor
    margins: Tensor | None = None


Loss = Callable[[LossInputs], "Tensor | PolicyLoss"]
LOSSES = Registry[Loss]("training.algorithm.loss")


class Traits:
    """Sets of losses that the trainer treats in another way."""

    one_ratio_per_sequence: ClassVar[set[Loss]] = set()
    corrects_itself: ClassVar[set[Loss]] = set()
    every_sample: ClassVar[set[Loss]] = set()
    needs_reference: ClassVar[set[Loss]] = set()
    of_pairs: ClassVar[set[Loss]] = set()
    of_scores: ClassVar[set[Loss]] = set()
    needs_teacher: ClassVar[set[Loss]] = set()


def one_ratio_per_sequence(function: Loss) -> Loss:
    """Marks a loss whose tokens share the ratio of their sequence: its corrections are those of sequences."""
    Traits.one_ratio_per_sequence.add(function)
    return function


def corrects_itself(function: Loss) -> Loss:
    """Marks a loss that uses the engine's logprobs itself: no correction is applied to it."""
    Traits.corrects_itself.add(function)
    return function


def every_sample(function: Loss) -> Loss:
    """Marks a loss that learns from samples whose advantage is 0 too."""
    Traits.every_sample.add(function)
    return function


def needs_reference(function: Loss) -> Loss:
    """Marks a loss that compares with the policy at the start of RL."""
    Traits.needs_reference.add(function)
    return function


def of_pairs(function: Loss) -> Loss:
    """Marks a loss of pairs of sequences, which nothing sampled and which stay together in a pass."""
    Traits.of_pairs.add(function)
    return corrects_itself(every_sample(function))


def of_scores(function: Loss) -> Loss:
    """Marks a loss of pairs whose model is a reward model: it scores sequences in place of tokens."""
    Traits.of_scores.add(function)
    return of_pairs(function)


def needs_teacher(function: Loss) -> Loss:
    """Marks a loss that needs a teacher's logprobs in every sample."""
    Traits.needs_teacher.add(function)
    return every_sample(function)


def policy_loss(function: Loss, inputs: LossInputs) -> PolicyLoss:
    """The loss of every token. Without tokens, as on a rank that has nothing in a pass, `function` is not called."""
    empty = inputs.logprobs.numel() == 0
    if not empty and function in Traits.needs_teacher and inputs.teacher_logprobs is None:
        raise RollartError(f"the loss {inputs.config.loss!r} needs the logprobs of a teacher, which the samples lack")
    result = inputs.logprobs if empty else function(inputs)
    if not isinstance(result, PolicyLoss):
        result = PolicyLoss(result, inputs.logprobs.new_zeros(inputs.logprobs.shape).bool())
    if result.loss.shape != inputs.logprobs.shape:
        raise RollartError(
            f"the loss {inputs.config.loss!r} must return one value per token, a tensor of shape "
            f"{tuple(inputs.logprobs.shape)}, not {tuple(result.loss.shape)}"
        )
    return result


def sum_by(values: Tensor, owners: Tensor) -> Tensor:
    """One sum per owner."""
    return values.new_zeros(int(owners.max()) + 1).index_add(0, owners, values)


def kl_to_reference(current: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(current || reference): never negative, unbiased, zero where they agree."""
    difference = reference - current
    return difference.exp() - difference - 1


def weighted_kl(inputs: LossInputs, reference: Tensor, correction: Tensor) -> Tensor:
    """The estimate of each token, weighted by how much likelier the token is now than when it was sampled. The weight
    carries a gradient too: without it the gradient is not that of the KL."""
    return correction * inputs.ratio * kl_to_reference(inputs.logprobs, reference)


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
