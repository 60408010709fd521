"""Sampling: temperature, top-k, top-p, then inverse CDF with a counter-based random number.

The random number of a token depends only on (seed of the request, index of the token in its answer), and rows of
logits are independent, so a result does not depend on the rest of the batch and can be reproduced.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_STRIDE = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Sampleable(Protocol):
    """The fields of a sequence that the sampler reads."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    drawn: int
    logprobs: list[float]


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF: the first token whose cumulated probability exceeds `uniform`, so never one of probability 0."""
    logprobs = torch.log_softmax(logits.float(), -1)
    cumulated = logprobs.exp().cumsum(-1)
    target = (uniform * cumulated[:, -1]).unsqueeze(1)
    tokens = torch.searchsorted(cumulated, target, right=True).clamp_(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def sample(
    logits: Tensor,
    sequences: Sequence[Sampleable],
    draw: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = draw,
) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` and its log probability under the distribution it was drawn from."""
    device = logits.device
    temperatures = [sequence.temperature for sequence in sequences]
    if temperatures.count(1.0) < len(temperatures):
        logits = logits.float() / torch.tensor(temperatures, device=device).unsqueeze(1)
    filtered = [index for index, sequence in enumerate(sequences) if sequence.top_k > 0 or sequence.top_p < 1.0]
    if filtered:
        logits = logits.float()
        rows = torch.tensor(filtered, device=device)
        top_k = torch.tensor([sequences[index].top_k for index in filtered], device=device)
        top_p = torch.tensor([sequences[index].top_p for index in filtered], device=device)
        logits = logits.index_copy(0, rows, keep_top(logits[rows], top_k, top_p))
    seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
    counts = np.array([sequence.drawn + len(sequence.logprobs) for sequence in sequences], dtype=np.uint64)
    return draw(logits, torch.from_numpy(uniforms(seeds, counts)).to(device))


def keep_top(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets all but the `top_k` best (0: all) to -inf, then all but the fewest that hold `top_p` of what is left."""
    width = logits.shape[1]
    if bool((top_k > 0).all()):
        width = min(width, int(top_k.max()))
        values, order = logits.topk(width)
    else:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
    wanted = torch.where(top_k > 0, top_k, width).unsqueeze(1)
    values = values.masked_fill(torch.arange(width, device=logits.device) >= wanted, -torch.inf)
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    # Rounding must not cut the tail where there is no top-p.
    beyond = (before >= top_p.unsqueeze(1)) & (top_p < 1).unsqueeze(1)
    return torch.full_like(logits, -torch.inf).scatter(1, order, values.masked_fill(beyond, -torch.inf))


def uniforms(seeds: NDArray[np.uint64], counts: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Multiples of 2**-24 in [0, 1), by a counter hash in the manner of splitmix64."""
    bits = _mix(seeds + (counts + np.uint64(1)) * np.uint64(_STRIDE)) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-24)


def mix_seed(seed: int) -> int:
    """Spreads small seeds over 64 bits, so that the streams of neighbours do not overlap."""
    return int(_mix(np.array([seed & _WORD], dtype=np.uint64) ^ np.uint64(_STRIDE))[0])


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
