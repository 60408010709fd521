"""Context parallelism: several ranks share each sequence (Ulysses).

All of a decoder but attention treats tokens one by one, so each rank runs it on a contiguous slice of the flat
micro-batch. Around attention the ranks exchange heads for tokens: each gets all tokens of some heads, and afterwards
all heads of its tokens. What is computed per token in the end is gathered, so that losses see whole sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Peers:
    """Ranks that share something, and the place of this one among them."""

    group: distributed.ProcessGroup
    rank: int
    size: int


class ContextPeers(Peers):
    """The ranks that share sequences."""

    __slots__ = ()

    def slice_of(self, tokens: int) -> tuple[int, int]:
        """This rank's positions among `tokens` flat ones: the first, and how many. The last slice may go beyond the
        end: all slices have one size."""
        size = -(-tokens // self.size)
        return self.rank * size, size

    def cut(self, flat: Tensor) -> Tensor:
        """This rank's slice of [1, T], padded with zeros."""
        start, size = self.slice_of(flat.shape[1])
        return functional.pad(flat, (0, size * self.size - flat.shape[1]))[:, start : start + size]

    def to_heads(self, states: Tensor, tokens: int) -> Tensor:
        """[1, heads, slice, dim] of this rank's tokens to [1, heads / size, tokens, dim]."""
        _, heads, size, dim = states.shape
        mine = states[0].reshape(heads, size, dim).contiguous()
        theirs = _exchange(mine, self.group).view(self.size, heads // self.size, size, dim)
        return theirs.transpose(0, 1).reshape(1, heads // self.size, self.size * size, dim)[:, :, :tokens]

    def to_tokens(self, states: Tensor) -> Tensor:
        """[1, tokens, heads / size, dim] to [1, slice, heads, dim]."""
        _, tokens, heads, dim = states.shape
        _, size = self.slice_of(tokens)
        whole = functional.pad(states[0], (0, 0, 0, 0, 0, size * self.size - tokens)).contiguous()
        theirs = _exchange(whole, self.group).view(self.size, size, heads, dim)
        return theirs.transpose(0, 1).reshape(1, size, self.size * heads, dim)

    def gather(self, values: Tensor, sizes: list[int]) -> Tensor:
        """One after the other the values of all ranks, of which each has one of `sizes`. The gradient of a rank's own
        values is that of its own copy: every rank computes the same loss."""
        whole: Tensor = _Gather.apply(values, self, sizes)  # type: ignore[no-untyped-call]
        return whole


def _exchange(states: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Rank r gets the r-th part of the first dimension of every rank."""
    return all_to_all_single_autograd(states, None, None, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, peers: ContextPeers, sizes: list[int]) -> Tensor:
        ctx.start, ctx.size = sum(sizes[: peers.rank]), sizes[peers.rank]
        width = max(1, *sizes)
        padded = functional.pad(values, (0, width - len(values)))
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=peers.group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.start : ctx.start + ctx.size], None, None
