"""Losses that pull the policy towards a teacher: at the sampled token, or over the teacher's likeliest tokens.

Over the likeliest tokens both distributions are cut to these and what is left is one more token, so the losses are
divergences of true distributions: never negative, and zero only where the two agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from math import log
from typing import TYPE_CHECKING

from rollart.core.errors import RollartError
from rollart.training.losses.base import LOSSES, LossInputs, needs_teacher

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 1e-8


@LOSSES.register
@needs_teacher
def opd(inputs: LossInputs) -> Tensor:
    """On-policy distillation: REINFORCE whose advantage is how much likelier the teacher finds the sampled token. Its
    expectation is the gradient of KL(policy || teacher)."""
    assert inputs.teacher_logprobs is not None
    advantage = inputs.teacher_logprobs - inputs.logprobs.detach()
    return -inputs.ratio.detach() * advantage * inputs.logprobs


@LOSSES.register
@needs_teacher
def reverse_kl(inputs: LossInputs) -> Tensor:
    """KL(policy || teacher) over the teacher's likeliest tokens: seeks one of the teacher's modes."""
    return _sum(ours.exp() * (ours - theirs) for ours, theirs in _columns(inputs))


@LOSSES.register
@needs_teacher
def forward_kl(inputs: LossInputs) -> Tensor:
    """KL(teacher || policy) over the teacher's likeliest tokens: covers all that the teacher does."""
    return _sum(theirs.exp() * (theirs - ours) for ours, theirs in _columns(inputs))


@LOSSES.register
@needs_teacher
def jensen_shannon(inputs: LossInputs) -> Tensor:
    """The mean of both KLs to the mixture of the two."""
    terms = []
    for ours, theirs in _columns(inputs):
        middle = ours.logaddexp(theirs) - log(2)
        terms.append((ours.exp() * (ours - middle) + theirs.exp() * (theirs - middle)) / 2)
    return _sum(terms)


def _columns(inputs: LossInputs) -> Iterator[tuple[Tensor, Tensor]]:
    """Logprobs of policy and teacher: one of the likeliest tokens after the other, then all the remaining ones."""
    ours, theirs = inputs.top_logprobs, inputs.teacher_top_logprobs
    if ours is None or theirs is None:
        raise RollartError(f"the loss {inputs.config.loss!r} needs the likeliest tokens of the teacher")
    ours, theirs = (top[..., : inputs.config.teacher_top] for top in (ours, theirs))
    yield from zip(ours.unbind(-1), theirs.unbind(-1), strict=True)
    yield _rest(ours), _rest(theirs)


def _rest(top: Tensor) -> Tensor:
    return (1 - top.exp().sum(-1)).clamp(min=SMALLEST).log()


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return reduce(lambda left, right: left + right, terms)
