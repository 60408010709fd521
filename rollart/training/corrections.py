"""What is done about stale tokens: small functions that give each token a factor of its loss, 0 to drop it.

w is the probability of a token by the proximal policy, the trainer's before the step, over that by the behaviour
policy, which sampled it. Weights make the gradient that of the proximal policy, with a cap on the variance; masks drop
tokens or sequences that say more about the distance of the two policies than about the reward. What they would have to
correct is measured whatever is chosen: `measure`.

A correction is added by writing it here under `@CORRECTIONS.register`. As losses.py, this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from rollart.config import CorrectionConfig
from rollart.core.errors import RollartError
from rollart.training.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CorrectionInputs:
    """The tokens of one micro-batch that the policy sampled. `sequences` and `turns` number those of each from 0."""

    old_logprobs: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    sequences: Tensor
    turns: Tensor
    config: CorrectionConfig

    @property
    def log_ratio(self) -> Tensor:
        return self.old_logprobs.detach() - self.engine_logprobs


Correction = Callable[[CorrectionInputs], "Tensor"]
CORRECTIONS = Registry[Correction]("training.algorithm.correction")


def correct(functions: list[Correction], inputs: CorrectionInputs) -> Tensor:
    """The product of the factors of each token; 1 everywhere without functions."""
    ones = inputs.engine_logprobs.new_ones(inputs.engine_logprobs.shape)
    if not len(ones):
        return ones
    factors = [function(inputs) for function in functions]
    for function, factor in zip(functions, factors, strict=True):
        if factor.shape != ones.shape:
            name = getattr(function, "__name__", function)
            raise RollartError(
                f"the correction {name!r} must return one factor per token, a tensor of shape {tuple(ones.shape)}, "
                f"not {tuple(factor.shape)}"
            )
    return reduce(lambda left, right: left * right.to(left.dtype), factors, ones)


@CORRECTIONS.register
def token(inputs: CorrectionInputs) -> Tensor:
    """Truncated importance sampling: min(w, cap)."""
    return inputs.log_ratio.exp().clamp(max=inputs.config.cap)


@CORRECTIONS.register
def turn(inputs: CorrectionInputs) -> Tensor:
    """The product of w over the turn, truncated: all its tokens have the same weight."""
    return _sums(inputs.log_ratio, inputs.turns).exp().clamp(max=inputs.config.cap)


@CORRECTIONS.register
def sequence(inputs: CorrectionInputs) -> Tensor:
    """The product of w over the sequence, truncated: unbiased without the cap, and of high variance."""
    return _sums(inputs.log_ratio, inputs.sequences).exp().clamp(max=inputs.config.cap)


@CORRECTIONS.register
def geometric(inputs: CorrectionInputs) -> Tensor:
    """The geometric mean of w over the sequence, truncated: what a loss with one ratio per sequence needs."""
    return means(inputs.log_ratio, inputs.sequences).exp().clamp(max=inputs.config.cap)


@CORRECTIONS.register
def icepop(inputs: CorrectionInputs) -> Tensor:
    """w within a range, and 0 outside of it."""
    ratio = inputs.log_ratio.exp()
    return ratio * _within(ratio, inputs.config.icepop)


@CORRECTIONS.register
def kpop(inputs: CorrectionInputs) -> Tensor:
    """Drops a token if the two policies, as coin flips (this token or another), have a large KL in either direction."""
    ours, theirs = (p.exp().clamp(1e-7, 1 - 1e-7) for p in (inputs.old_logprobs.detach(), inputs.engine_logprobs))
    forward = ours * (ours / theirs).log() + (1 - ours) * ((1 - ours) / (1 - theirs)).log()
    backward = theirs * (theirs / ours).log() + (1 - theirs) * ((1 - theirs) / (1 - ours)).log()
    return forward.maximum(backward) <= inputs.config.kpop


@CORRECTIONS.register
def dppo(inputs: CorrectionInputs) -> Tensor:
    """Drops a token whose probability has moved far already, the way that its advantage points."""
    moved = inputs.old_logprobs.detach().exp() - inputs.engine_logprobs.exp()
    return ~(moved * inputs.advantages.sign() > inputs.config.dppo)


@CORRECTIONS.register
def m2po(inputs: CorrectionInputs) -> Tensor:
    """Drops the tokens with the largest (log w)^2 of the pass until the mean of the others is small enough."""
    squares = inputs.log_ratio**2
    ordered, order = squares.sort()
    counts = ordered.new_ones(ordered.shape).cumsum(0)
    kept = ordered.cumsum(0) / counts <= inputs.config.m2po  # means of more and larger squares: true, then false
    return kept.new_zeros(kept.shape).scatter(0, order, kept)


@CORRECTIONS.register
def sequence_mask(inputs: CorrectionInputs) -> Tensor:
    """Drops a sequence whose product of w is out of range (MIS)."""
    return _within(_sums(inputs.log_ratio, inputs.sequences).exp(), inputs.config.sequence_mask)


@CORRECTIONS.register
def geometric_mask(inputs: CorrectionInputs) -> Tensor:
    """Drops a sequence whose geometric mean of w is out of range (Geo-RS)."""
    return _within(means(inputs.log_ratio, inputs.sequences).exp(), inputs.config.geometric_mask)


OF_SEQUENCES: dict[Correction, Correction] = {token: geometric, turn: geometric}


def find(config: CorrectionConfig, *, one_ratio_per_sequence: bool = False) -> list[Correction]:
    """Those of the run file. A loss with one ratio per sequence gets one weight per sequence too: the mean of token
    weights is not the weight of the sequence. Raises ConfigError."""
    found = [CORRECTIONS.find(name) for name in config.use]
    return [OF_SEQUENCES.get(one, one) for one in found] if one_ratio_per_sequence else found


def measure(inputs: CorrectionInputs, factor: Tensor) -> dict[str, Tensor]:
    """Values per token, of which the step reports sums or means: w and its square (for the effective sample size), the
    estimate of the KL between the two policies, whether w is above the cap, and whether the token was dropped."""
    log_ratio = inputs.log_ratio
    ratio = log_ratio.exp()
    return {
        "importance": factor,
        "ratio": ratio,
        "ratio_squared": ratio**2,
        "stale_kl": ratio - log_ratio - 1,
        "over_cap": ratio > inputs.config.cap,
        "dropped": factor == 0,
    }


def _within(values: Tensor, band: tuple[float, float]) -> Tensor:
    return (values >= band[0]) & (values <= band[1])


def _sums(values: Tensor, owners: Tensor) -> Tensor:
    """At every token the sum over its owner."""
    totals = values.new_zeros(int(owners.max()) + 1).index_add(0, owners, values)
    return totals[owners]


def means(values: Tensor, owners: Tensor) -> Tensor:
    """At every token the mean over its owner."""
    return _sums(values, owners) / owners.bincount()[owners].to(values.dtype)
