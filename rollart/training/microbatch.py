"""A batch made ready to train: the samples that can move the policy, dealt to the ranks and packed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import Tensor

from rollart.core.types import Batch, Sample
from rollart.training.logprob_gap import Cells
from rollart.training.losses import token_weights
from rollart.training.packing import Packed, deal, pack


class Item(Struct, frozen=True, array_like=True, gc=False):
    """A sample as a rank trains it. `behaviour` has the engine's logprob of every action token, `cells` the number of
    the cell that its gap is counted in."""

    tokens: list[int]
    mask: list[int]
    behaviour: list[float]
    cells: list[int]
    temperature: float
    advantage: float
    weight: float


NOTHING = Item([0], [0], [], [], 1.0, 0.0, 0.0)


@dataclass(slots=True)
class MicroBatch:
    """One forward pass. The tensors are flat, one entry per action token; `sequence` counts from 0.

    The sum of `weight` over all tokens of all micro-batches is at most 1: samples left out keep their share.
    `proximal` is filled in by the first pass over the batch, `reference` only when the KL is asked for.
    """

    packed: Packed
    advantage: Tensor
    weight: Tensor
    behaviour: Tensor
    cell: Tensor
    sequence: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


def check(batch: Batch) -> None:
    """Raises ValueError with a sentence about the first sample that cannot be trained."""
    if not any(group.samples for group in batch.groups):
        raise ValueError(f"the batch of step {batch.step} holds no samples")
    for group in batch.groups:
        for sample in group.samples:
            sizes = {len(sample.tokens), len(sample.mask), len(sample.logprobs), len(sample.versions)}
            if len(sizes) > 1:
                raise ValueError(
                    f"sample {sample.id} has {len(sample.tokens)} tokens, {len(sample.mask)} mask bits, "
                    f"{len(sample.logprobs)} logprobs and {len(sample.versions)} versions; the numbers must agree"
                )


def deal_samples(
    batch: Batch,
    advantages: Sequence[Sequence[float]],
    cells: Cells,
    aggregate: str,
    pack_tokens: int,
    *,
    keep_all: bool,
    ranks: int = 1,
) -> list[list[list[Item]]]:
    """What each rank trains in each of its passes; they all have as many, and one of them may be empty. `cells` numbers
    what it meets.

    There is one of the `advantages` for each trajectory of a group, which all its segments share. A sample of advantage
    0 has no gradient and is left out, unless `keep_all` (KL, entropy).
    """
    samples: list[Sample] = []
    owners: list[int] = []
    sequences: list[int] = []
    values: list[float] = []
    known: dict[tuple[int, str], int] = {}
    for number, (group, members) in enumerate(zip(batch.groups, advantages, strict=True)):
        scores = dict(zip(group.rewards, members, strict=True))
        samples += group.samples
        owners += [number] * len(group.samples)
        sequences += [known.setdefault((number, sample.owner), len(known)) for sample in group.samples]
        values += [scores[sample.owner] for sample in group.samples]
    lengths = [sum(sample.mask) for sample in samples]
    weights = token_weights(lengths, owners, aggregate, sequences)
    chosen = [i for i, length in enumerate(lengths) if length and (keep_all or values[i] != 0.0)]
    items = [_item(samples[i], cells, values[i], weights[i]) for i in chosen]
    hands = deal([len(item.tokens) for item in items], pack_tokens, ranks)
    return [[[items[i] for i in part] for part in passes] for passes in hands]


def _item(sample: Sample, cells: Cells, advantage: float, weight: float) -> Item:
    behaviour = [logprob for logprob, bit in zip(sample.logprobs, sample.mask, strict=True) if bit]
    return Item(sample.tokens, sample.mask, behaviour, cells.of(sample), sample.temperature, advantage, weight)


def micro_batch(items: Sequence[Item]) -> MicroBatch:
    """Of no items, a pass that trains nothing: its loss and its gradients are zero."""
    items = items or [NOTHING]
    counts = torch.tensor([len(item.behaviour) for item in items])
    sequence = torch.arange(len(items)).repeat_interleave(counts)
    return MicroBatch(
        pack([item.tokens for item in items], [item.mask for item in items], [item.temperature for item in items]),
        advantage=torch.tensor([item.advantage for item in items])[sequence],
        weight=torch.tensor([item.weight for item in items])[sequence],
        behaviour=torch.tensor([logprob for item in items for logprob in item.behaviour]),
        cell=torch.tensor([number for item in items for number in item.cells], dtype=torch.long),
        sequence=sequence,
    )
