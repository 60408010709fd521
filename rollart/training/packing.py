"""Sequence packing without cross-attention.

Everything in a decoder but attention treats tokens one by one, so it runs on the real tokens of a micro-batch laid end
to end, [1, T], with no padding. Attention alone puts them into a right-padded [rows, width] grid and back: under a
causal mask no token sees what lies to its right, so padding never leaks and no mask is built. The function is
registered with transformers, so any of its decoders can use it.

A trajectory is one sequence for all its turns: history is trained once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rollart.core.errors import RollartError
from rollart.training.context import ContextPeers

ATTENTION = "rollart_packed"


class Packed(Struct, frozen=True):
    """A micro-batch. `predict` are the flat positions whose next token is trained, `targets` those next tokens, and
    `temperature` divides the logits there (None: 1 everywhere).

    `grid` holds the flat position shown in every slot of the padded grid, `slots` the slot of every flat position;
    both are None when the sequences are of one length and the grid is the flat layout already. `starts` are the flat
    positions of the sequences, and the end of the last. `experts` are those that the engine used, [T, layers, choices],
    -1 where that is not known.

    Not a dataclass: FSDP casts the tensors inside those to the compute dtype.
    """

    tokens: Tensor
    positions: Tensor
    rows: int
    width: int
    grid: Tensor | None
    slots: Tensor | None
    predict: Tensor
    targets: Tensor
    starts: Tensor
    temperature: Tensor | None = None
    experts: Tensor | None = None


def plan(lengths: Sequence[int], pack_tokens: int) -> list[list[int]]:
    """Indices of micro-batches: neighbours in length, so the grid is nearly full, each of at most `pack_tokens` slots.

    >>> plan([5, 90, 6, 100], 200)
    [[3, 1], [2, 0]]
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * width <= pack_tokens and 2 * lengths[index] > width:
            batches[-1].append(index)
        else:
            batches.append([index])
            width = lengths[index]
    return batches


def split_over_ranks(lengths: Sequence[int], pack_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Indices by rank and forward pass. All ranks get the same number of passes, and about as many tokens in each.
    Sequences are assigned from the longest to the shortest, in rounds that alternate the order of the ranks; the last
    round may leave a rank without any.

    >>> split_over_ranks([5, 90, 6, 100, 7], 200, 2)
    [[[3], [2, 0]], [[1], [4]]]
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    rounds = [order[at : at + ranks] for at in range(0, len(order), ranks)]
    passes = plan([lengths[one[0]] for one in rounds], pack_tokens)
    turns = [range(ranks), range(ranks - 1, -1, -1)]
    return [
        [[rounds[i][turn] for i in part if (turn := turns[i % 2][rank]) < len(rounds[i])] for part in passes]
        for rank in range(ranks)
    ]


def deal(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Indices by part: from the largest to the smallest, in rounds that give one to each part, the largest of a round
    to the part with the least so far.

    >>> deal([5, 90, 6, 100, 7], 2)
    [[3, 2], [1, 4, 0]]
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    out: list[list[int]] = [[] for _ in range(parts)]
    for start in range(0, len(order), parts):
        lightest = sorted(out, key=lambda part: sum(sizes[i] for i in part))
        for part, index in zip(lightest, order[start : start + parts], strict=False):
            part.append(index)
    return out


def pack(
    tokens: Sequence[ArrayLike], masks: Sequence[ArrayLike], temperatures: Sequence[float] | None = None
) -> Packed:
    """Lay the sequences end to end. The tokens where a mask is 1 are trained, in the order given."""
    flat, mask = (torch.tensor(np.concatenate(parts).astype(np.int64)) for parts in (tokens, masks))
    lengths = torch.tensor([np.size(sequence) for sequence in tokens])
    rows, width = len(tokens), int(lengths.max())
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(flat)) - starts.repeat_interleave(lengths)
    if bool(mask[starts].any()):
        raise ValueError("the first token of a sequence cannot be trained: nothing comes before it to predict it from")
    trained = mask.nonzero().squeeze(1)
    grid = slots = None
    if len(flat) < rows * width:
        slots = torch.arange(rows).repeat_interleave(lengths) * width + positions
        grid = torch.zeros(rows * width, dtype=torch.long).index_copy_(0, slots, torch.arange(len(flat)))
    temperature = None
    if temperatures is not None and any(value != 1.0 for value in temperatures):
        temperature = torch.tensor(temperatures).repeat_interleave(lengths)[trained]
    return Packed(
        tokens=flat[None],
        positions=positions[None],
        rows=rows,
        width=width,
        grid=grid,
        slots=slots,
        predict=trained - 1,
        targets=flat[trained],
        starts=functional.pad(lengths.cumsum(0), (1, 0)).int(),
        temperature=temperature,
    )


class _ToGrid(torch.autograd.Function):
    """Padding slots show token 0, whose value is harmless and whose gradient is zero: nothing reads those slots."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, grid: Tensor, slots: Tensor) -> Tensor:
        ctx.slots = slots
        return flat.index_select(0, grid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, ctx.slots), None, None


class _ToFlat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.slots, ctx.shape = slots, padded.shape
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_zeros(ctx.shape).index_copy_(0, ctx.slots, grads[0]), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed,
    context: ContextPeers | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[1, heads, T, dim] in, [1, T, heads, dim] out, the shapes of transformers' attention functions. With a `context`,
    T is this rank's slice. There is no dropout: the policy is in evaluation mode."""
    if softcap is not None:
        raise RollartError("this model caps its attention scores, which training does not support; choose another")
    if context is not None:
        if key.shape[1] % context.size:  # fewer KV heads than ranks: each query head brings its own
            key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
        tokens = packed.tokens.shape[1]
        query, key, value = (context.to_heads(states, tokens) for states in (query, key, value))
    window = None if sliding_window is None or sliding_window >= packed.width else sliding_window
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    out = (_flash if flash else _in_grid)(query, key, value, packed, scaling, window)
    return (out if context is None else context.to_tokens(out)), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """FlashAttention on the flat layout. Never exercised: it needs a GPU."""
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_q=packed.starts,
        cu_seq_k=packed.starts,
        max_q=packed.width,
        max_k=packed.width,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


def _in_grid(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    rows, width = packed.rows, packed.width
    if query.is_cuda and query.shape[1] != key.shape[1]:  # float32 with grouped heads has no kernel but the slow one
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))

    def to_grid(states: Tensor) -> Tensor:
        flat = states.transpose(1, 2)[0]
        if packed.grid is not None and packed.slots is not None:
            flat = _ToGrid.apply(flat, packed.grid, packed.slots)  # type: ignore[no-untyped-call]
        return flat.reshape(rows, width, *flat.shape[1:]).transpose(1, 2)

    mask = None
    if window is not None:
        mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    out = functional.scaled_dot_product_attention(
        to_grid(query),
        to_grid(key),
        to_grid(value),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    flat = out.transpose(1, 2).reshape(rows * width, *out.shape[1:2], out.shape[3])
    if packed.slots is not None:
        flat = _ToFlat.apply(flat, packed.slots)  # type: ignore[no-untyped-call]
    return flat[None]


# No mask function is registered under this name, so transformers builds none.
AttentionInterface.register(ATTENTION, packed_attention)
