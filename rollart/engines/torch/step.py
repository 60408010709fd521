"""The inputs of one forward pass: a flat row of tokens, where their KV goes, and what attends to what.

First come the decoding rows, one token each, then the chunks of the prefilling ones. A span is a run of neighbouring
rows that one attention call serves; chunks of unequal length are padded within it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollart.engines.torch.batch import BatchState, Chunk
from rollart.engines.torch.sequence import EngineSequence

# Cost of one more attention call in query-key pairs, measured on a small model on a CPU.
CALL_COST = 8192


@dataclass(slots=True)
class AttentionSpan:
    """`starts` holds the position of each row's first query, `counts` the queries of each row, unless all have the
    same number."""

    rows: slice
    tokens: slice
    queries: int
    keys: int
    starts: Tensor
    dtype: torch.dtype
    counts: list[int] | None = None
    _padding: tuple[Tensor, Tensor] | None = None
    _bias: dict[int | None, Tensor] = field(default_factory=dict)

    def padding(self) -> tuple[Tensor, Tensor] | None:
        """Picks the flat tokens that fill [rows, queries], and the positions in it that are not padding; None if all
        are real."""
        if self._padding is None and self.counts is not None:
            first = self.tokens.start
            padded: list[int] = []
            real: list[int] = []
            for index, count in enumerate(self.counts):
                padded += [*range(first, first + count), *[first] * (self.queries - count)]
                real += range(index * self.queries, index * self.queries + count)
                first += count
            device = self.starts.device
            self._padding = torch.tensor(padded, device=device), torch.tensor(real, device=device)
        return self._padding

    def bias(self, window: int | None) -> Tensor:
        """[rows, 1, queries, keys]: 0 where a query sees a key, -inf otherwise. Computed once a step for all layers."""
        bias = self._bias.get(window)
        if bias is None:
            device = self.starts.device
            key = torch.arange(self.keys, device=device)
            query = (self.starts.unsqueeze(1) + torch.arange(self.queries, device=device)).unsqueeze(2)
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            bias = torch.zeros(hidden.shape, dtype=self.dtype, device=device).masked_fill_(hidden, -torch.inf)
            self._bias[window] = bias = bias.unsqueeze(1)
        return bias


@dataclass(slots=True)
class StepInputs:
    """`rows` and `positions` are where the KV of each token goes in `layers`, the KV rows; `wanted` picks the tokens
    whose logits are sampled from, all if None."""

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    wanted: Tensor | None
    spans: list[AttentionSpan]
    layers: list[Tensor]
    sampled: list[EngineSequence]
    _slots: Tensor | None = None

    @property
    def slots(self) -> Tensor:
        """Where the KV of each head of each token goes in the flattened rows."""
        if self._slots is None:
            heads, capacity = self.layers[0].shape[1:3]
            head = torch.arange(0, heads * capacity, capacity, device=self.rows.device)
            self._slots = ((self.rows * (heads * capacity) + self.positions[0]).unsqueeze(1) + head).flatten()
        return self._slots


def step_inputs(batch: BatchState, chunks: Sequence[Chunk], layers: list[Tensor]) -> StepInputs:
    running, decoding = batch.running, batch.decoding
    tokens = [sequence.tokens[-1] for sequence in running[:decoding]]
    positions = [sequence.computed for sequence in running[:decoding]]
    sampled = running[:decoding]
    rows = list(range(decoding))
    wanted = list(range(decoding))
    for chunk in chunks:
        sequence = running[chunk.row]
        stop = chunk.start + chunk.count
        tokens += sequence.tokens[chunk.start : stop]
        positions += range(chunk.start, stop)
        rows += [chunk.row] * chunk.count
        if stop == len(sequence.tokens):
            sampled.append(sequence)
            wanted.append(len(tokens) - 1)
    device, count = layers[0].device, len(tokens)
    # Several times as fast as a tensor made of a list.
    packed = torch.from_numpy(np.array([*tokens, *positions, *rows, *wanted], dtype=np.int64)).to(device)
    flat, places, row, last = packed.tensor_split([count, 2 * count, 3 * count])
    spans = []
    if decoding:
        keys = max(positions[:decoding]) + 1
        spans.append(
            AttentionSpan(
                rows=slice(0, decoding),
                tokens=slice(0, decoding),
                queries=1,
                keys=keys,
                starts=places[:decoding],
                dtype=layers[0].dtype,
            )
        )
    first = decoding
    for group in grouped(chunks):
        spans.append(_span(group, first, layers[0].dtype, device))
        first = spans[-1].tokens.stop
    return StepInputs(
        tokens=flat.unsqueeze(0),
        positions=places.unsqueeze(0),
        rows=row,
        wanted=None if len(wanted) == count else last,
        spans=spans,
        layers=layers,
        sampled=sampled,
    )


def grouped(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Splits neighbouring chunks so that padding costs less than the attention calls it saves."""
    group: list[Chunk] = []
    for chunk in chunks:
        if group and _area([*group, chunk]) > _area(group) + _area([chunk]) + CALL_COST:
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def _area(group: Sequence[Chunk]) -> int:
    keys = max(chunk.start + chunk.count for chunk in group)
    return len(group) * max(chunk.count for chunk in group) * keys


def _span(group: Sequence[Chunk], first: int, dtype: torch.dtype, device: torch.device) -> AttentionSpan:
    """`first` is the index of the group's first token in the flat row."""
    counts = [chunk.count for chunk in group]
    queries = max(counts)
    return AttentionSpan(
        rows=slice(group[0].row, group[-1].row + 1),
        tokens=slice(first, first + sum(counts)),
        queries=queries,
        keys=max(chunk.start + chunk.count for chunk in group),
        starts=torch.tensor([chunk.start for chunk in group], device=device),
        dtype=dtype,
        counts=counts if min(counts) < queries else None,
    )
