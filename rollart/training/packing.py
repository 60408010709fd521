"""Sequence packing without cross-attention.

Everything in a decoder but attention treats tokens one by one, so it runs on the real tokens of a micro-batch laid end
to end, [1, T], with no padding. Attention alone puts them into right-padded [rows, width] bands, one for each order of
length, and back: under a causal mask no token sees what lies to its right, so padding never leaks and no mask is built.
The bands end to end are the grid. The function is registered with transformers, so any of its decoders can use it.

A trajectory is one sequence for all its turns: history is trained once. The members of a group begin with the same
prompt, and where attention allows it that is laid down once for all of them: the grid shows it in every row, and the
gradients of the rows are summed. Only attention itself computes it again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface

from rollart.core.errors import RollartError
from rollart.training.context import ContextPeers

ATTENTION = "rollart_packed"


class Packed(Struct, frozen=True):
    """A micro-batch. `predict` are the flat positions whose next token is trained, `targets` those next tokens, and
    `temperature` divides the logits there (None: 1 everywhere).

    `bands` are the rows and widths of the grid's parts, the widest first. `grid` holds the flat position shown in every
    slot, `slots` the slot that every flat position is computed in; both are None when the sequences are of one length
    and the grid is the flat layout already. With shared
    prompts `shown` has all slots of each flat position, in its order, and where those of each begin. `starts` are the
    flat positions of the sequences, and the end of the last. `spans` has a row for every sequence, those with a prompt
    in common one after the other: where its own tokens begin and end, where the prompt that another one has begins and
    how long it is (0: it has its own), and the number of its family. `experts` are those that the engine used,
    [T, layers, choices], -1 where that is not known.

    Not a dataclass: FSDP casts the tensors inside those to the compute dtype.
    """

    tokens: Tensor
    positions: Tensor
    bands: tuple[tuple[int, int], ...]
    grid: Tensor | None
    slots: Tensor | None
    predict: Tensor
    targets: Tensor
    starts: Tensor
    spans: Tensor
    shown: tuple[Tensor, Tensor] | None = None
    temperature: Tensor | None = None
    experts: Tensor | None = None


def plan(lengths: Sequence[int], pack_tokens: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """Indices of micro-batches, from the longest sequence to the shortest, each of at most `pack_tokens` slots in the
    bands of its grid. An index stands for as many sequences as `rows` says, one if that is missing.

    >>> plan([5, 90, 6, 100], 200)
    [[3, 1], [2, 0]]
    """
    batches: list[list[int]] = []
    width = slots = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        more = 1 if rows is None else rows[index]
        width = _band(lengths[index], width)
        if batches and slots + more * width <= pack_tokens:
            batches[-1].append(index)
            slots += more * width
        else:
            batches.append([index])
            width, slots = lengths[index], more * lengths[index]
    return batches


def _band(length: int, width: int) -> int:
    """The width of the band for the next shorter sequence: the same, or narrower if most of a row would be padding."""
    return width if length <= width < 2 * length else length


def families(tokens: Sequence[NDArray[Any]], masks: Sequence[NDArray[Any]], pack_tokens: int) -> list[list[int]]:
    """Indices of sequences that share a prompt, the longest first; those of a family fit into one micro-batch."""
    same: dict[bytes, list[int]] = {}
    for index in sorted(range(len(tokens)), key=lambda i: -len(tokens[i])):
        same.setdefault(_prompt(tokens[index], masks[index]), []).append(index)
    whole = same.values()
    return [
        [members[i] for i in part] for members in whole for part in plan([len(tokens[i]) for i in members], pack_tokens)
    ]


def _prompt(tokens: NDArray[Any], mask: NDArray[Any]) -> bytes:
    """What comes before the first trained token."""
    return tokens[: int(mask.argmax())].tobytes()


def split_over_ranks(
    lengths: Sequence[int], pack_tokens: int, ranks: int, together: Sequence[Sequence[int]] | None = None
) -> list[list[list[int]]]:
    """Indices by rank and forward pass. All ranks get the same number of passes, and about as many tokens in each.
    Sequences are assigned from the longest to the shortest, in rounds that alternate the order of the ranks; the last
    round may leave a rank without any. What is `together`, the longest first, stays in one pass.

    >>> split_over_ranks([5, 90, 6, 100, 7], 200, 2)
    [[[3, 2, 0]], [[1, 4]]]
    """
    units = together or [[index] for index in range(len(lengths))]
    order = sorted(range(len(units)), key=lambda i: -lengths[units[i][0]])
    rounds = [order[at : at + ranks] for at in range(0, len(order), ranks)]
    rows = [max(len(units[i]) for i in one) for one in rounds]
    passes = plan([lengths[units[one[0]][0]] for one in rounds], pack_tokens, rows)
    turns = [range(ranks), range(ranks - 1, -1, -1)]
    return [
        [
            [i for at in part if (turn := turns[at % 2][rank]) < len(rounds[at]) for i in units[rounds[at][turn]]]
            for part in passes
        ]
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
    tokens: Sequence[ArrayLike],
    masks: Sequence[ArrayLike],
    temperatures: Sequence[float] | None = None,
    *,
    share: bool = False,
) -> Packed:
    """Lay the sequences end to end. The tokens where a mask is 1 are trained, in the order given. With `share` a prompt
    that several sequences begin with is laid down once."""
    parts, flags = [np.asarray(each, np.int64) for each in tokens], [np.asarray(each) for each in masks]
    lengths = np.array([len(part) for part in parts])
    rows, (bands, firsts) = len(parts), _bands(lengths)
    whole, mask = np.concatenate(parts), np.concatenate(flags)
    begins = lengths.cumsum() - lengths
    if mask[begins].any():
        raise ValueError("the first token of a sequence cannot be trained: nothing comes before it to predict it from")
    owner, borrowed = _borrowed(parts, flags) if share else (np.arange(rows), np.zeros(rows, np.int64))
    starts = (lengths - borrowed).cumsum() - (lengths - borrowed)
    spans = np.stack([starts, starts + lengths - borrowed, starts[owner], borrowed, owner], 1)
    row, column = np.arange(rows).repeat(lengths), np.arange(len(whole)) - begins.repeat(lengths)
    own = column >= borrowed[row]
    place = np.where(own, starts[row] - borrowed[row], starts[owner[row]]) + column  # in the flat layout
    slot, trained = firsts[row] + column, mask.nonzero()[0]
    flat, grid, slots, shown = whole[own], None, None, None
    size = sum(height * width for height, width in bands)
    if len(flat) < size or len(bands) > 1:
        spread = np.zeros(size, np.int64)
        spread[slot] = place
        grid, slots = torch.tensor(spread), torch.tensor(slot[own])
    if len(flat) < len(whole):
        counts = np.bincount(place)
        shown = torch.tensor(slot[place.argsort(kind="stable")]), torch.tensor(counts.cumsum() - counts)
    temperature = None
    if temperatures is not None and any(value != 1.0 for value in temperatures):
        temperature = torch.tensor(np.array(temperatures, np.float32)[row[trained]])
    return Packed(
        tokens=torch.tensor(flat)[None],
        positions=torch.tensor(column[own])[None],
        bands=bands,
        grid=grid,
        slots=slots,
        predict=torch.tensor(place[trained - 1]),
        targets=torch.tensor(whole[trained]),
        starts=torch.tensor(np.append(starts, len(flat)), dtype=torch.int32),
        spans=torch.tensor(spans[owner.argsort(kind="stable")]),
        shown=shown,
        temperature=temperature,
    )


def _bands(lengths: NDArray[np.int64]) -> tuple[tuple[tuple[int, int], ...], NDArray[np.int64]]:
    """The rows and widths of the bands, and the first slot of every sequence."""
    bands: list[list[int]] = []
    firsts = np.zeros(len(lengths), np.int64)
    width = size = 0
    for index in np.argsort(-lengths, kind="stable"):
        width = _band(int(lengths[index]), width)
        if not bands or bands[-1][1] != width:
            bands.append([0, width])
        bands[-1][0] += 1
        firsts[index] = size
        size += width
    return tuple((rows, width) for rows, width in bands), firsts


def _borrowed(
    tokens: Sequence[NDArray[Any]], masks: Sequence[NDArray[Any]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each sequence the one that has its prompt, itself or an earlier one, and how many tokens that lends it."""
    owner, borrowed = np.arange(len(tokens)), np.zeros(len(tokens), np.int64)
    known: dict[bytes, int] = {}
    for index, (sequence, mask) in enumerate(zip(tokens, masks, strict=True)):
        first = known.setdefault(_prompt(sequence, mask), index)
        if first != index:
            owner[index], borrowed[index] = first, mask.argmax()
    return owner, borrowed


class _ToGrid(torch.autograd.Function):
    """Padding slots show token 0, whose value is harmless and whose gradient is zero: nothing reads those slots."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, packed: Packed, summed: bool) -> Tensor:
        """With `summed`, what several slots show gets their gradients; else only that of the slot it is computed in."""
        assert packed.grid is not None
        ctx.slots, ctx.shown = packed.slots, packed.shown if summed else None
        return flat.index_select(0, packed.grid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        if ctx.shown is None:
            return grad.index_select(0, ctx.slots), None, None
        slots, begins = ctx.shown
        flat = functional.embedding_bag(slots, grad.reshape(len(grad), -1), begins, mode="sum")
        return flat.view(-1, *grad.shape[1:]), None, None


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
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    out = (_flash if flash else _in_grid)(query, key, value, packed, scaling, sliding_window)
    return (out if context is None else context.to_tokens(out)), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    """FlashAttention on the flat layout, which cannot show a prompt twice. Never exercised: it needs a GPU."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler, a second of CPU time

    assert packed.shown is None
    width = packed.bands[0][1]
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seq_q=packed.starts,
        cu_seq_k=packed.starts,
        max_q=width,
        max_k=width,
        scale=scaling,
        window_size=(-1 if window is None or window >= width else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


def _in_grid(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    if query.is_cuda and query.shape[1] != key.shape[1]:  # float32 with grouped heads has no kernel but the slow one
        key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], 1) for states in (key, value))
    rows, tokens = query.shape[2], packed.tokens.shape[1]  # more rows than tokens: the rest is padding

    def to_grid(states: Tensor, summed: bool = False) -> list[Tensor]:
        flat = states.transpose(1, 2)[0, :tokens]
        if not flat.is_cuda:
            flat = flat.float()  # on CPUs the backward pass in bfloat16 takes ten times as long
        if packed.grid is not None:
            flat = _ToGrid.apply(flat, packed, summed)  # type: ignore[no-untyped-call]
        parts = torch.split(flat, [rows * width for rows, width in packed.bands])
        shaped = zip(parts, packed.bands, strict=True)
        return [part.reshape(rows, width, *flat.shape[1:]).transpose(1, 2) for part, (rows, width) in shaped]

    bands = zip(to_grid(query), to_grid(key, summed=True), to_grid(value, summed=True), strict=True)
    outputs = [_in_band(*band, scaling, window).transpose(1, 2).flatten(0, 1) for band in bands]
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packed.slots is not None:
        flat = _ToFlat.apply(flat, packed.slots)  # type: ignore[no-untyped-call]
    if rows > tokens:
        flat = functional.pad(flat, (0, 0, 0, 0, 0, rows - tokens))
    return flat.to(query.dtype)[None]


def _in_band(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """[rows, heads, width, dim]."""
    width, mask = query.shape[2], None
    if window is not None and window < width:
        mask = torch.ones(width, width, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


# No mask function is registered under this name, so transformers builds none.
AttentionInterface.register(ATTENTION, packed_attention)
