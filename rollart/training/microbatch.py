"""From a batch to micro-batches: the samples that have a gradient, split over the ranks and packed."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from rollart.core.expert_choice import ExpertChoices
from rollart.core.types import Batch, Example, Sample
from rollart.training.logprob_gap import Cells
from rollart.training.losses import token_weights
from rollart.training.packing import Packed, deal, pack, split_over_ranks


class TrainSample(Struct, frozen=True, array_like=True, gc=False):
    """A sample as a rank trains it. `behaviour` has the engine's logprob of every action token, `cells` the number of
    its logprob-gap cell. `experts` are those that the engine used, with a row for every token."""

    tokens: list[int]
    mask: list[int]
    behaviour: list[float]
    cells: list[int]
    temperature: float
    advantage: float
    weight: float
    experts: ExpertChoices | None = None


EMPTY = TrainSample(tokens=[0], mask=[0], behaviour=[], cells=[], temperature=1.0, advantage=0.0, weight=0.0)


@dataclass(slots=True)
class MicroBatch:
    """One forward pass. The tensors are flat, one entry per action token; `sequence` numbers from 0.
    The sum of `weight` over all tokens of an update's micro-batches is at most 1: samples left out keep their share.
    `proximal` is the policy's before the first update of the batch; `reference` is there only if the KL has a weight.
    """

    packed: Packed
    advantage: Tensor
    weight: Tensor
    behaviour: Tensor
    cell: Tensor
    sequence: Tensor
    proximal: Tensor | None = None
    reference: Tensor | None = None


def check_batch(batch: Batch) -> None:
    """Raises ValueError about the first sample that cannot be trained."""
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


def split_into_mini_batches(
    batch: Batch, advantages: Sequence[Sequence[float]], updates: int, *, keep_all: bool
) -> list[list[int]]:
    """The groups of each update. Groups stay whole; each update gets as many as any other, give or take one, as many
    that have a gradient, and about as many tokens. There are fewer updates if fewer groups have a gradient: one without
    any would move the weights by momentum alone."""
    tokens = []
    for group, row in zip(batch.groups, advantages, strict=True):
        score = dict(zip(group.rewards, row, strict=True))
        kept = [sample for sample in group.samples if any(sample.mask) and (keep_all or score[sample.owner] != 0.0)]
        tokens.append(sum(len(sample.tokens) for sample in kept))
    count = max(1, min(updates, sum(map(bool, tokens))))
    return [sorted(part) for part in deal(tokens, count)]


def plan_passes(
    batch: Batch,
    advantages: Sequence[Sequence[float]],
    cells: Cells,
    *,
    aggregate: str,
    pack_tokens: int,
    keep_all: bool,
    ranks: int = 1,
) -> list[list[list[TrainSample]]]:
    """The samples of each rank in each of its passes. All ranks have the same number of passes; some may be empty.

    `advantages` has one value for each trajectory of a group, which all its segments share. A sample of advantage 0 has
    no gradient and is left out, unless `keep_all` (KL, entropy).
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    owners = [number for number, group in enumerate(batch.groups) for _ in group.samples]
    scores = [dict(zip(group.rewards, row, strict=True)) for group, row in zip(batch.groups, advantages, strict=True)]
    values = [scores[owner][sample.owner] for owner, sample in zip(owners, samples, strict=True)]
    known: dict[tuple[int, str], int] = {}
    sequences = [known.setdefault((owner, s.owner), len(known)) for owner, s in zip(owners, samples, strict=True)]
    lengths = [sum(sample.mask) for sample in samples]
    weights = token_weights(lengths, owners, aggregate, sequences)
    chosen = [i for i, length in enumerate(lengths) if length and (keep_all or values[i] != 0.0)]
    items = [_train_sample(samples[i], cells, values[i], weights[i]) for i in chosen]
    by_rank = split_over_ranks([len(item.tokens) for item in items], pack_tokens, ranks)
    return [[[items[i] for i in part] for part in passes] for passes in by_rank]


def _train_sample(sample: Sample, cells: Cells, advantage: float, weight: float) -> TrainSample:
    behaviour = [logprob for logprob, bit in zip(sample.logprobs, sample.mask, strict=True) if bit]
    return TrainSample(
        tokens=sample.tokens,
        mask=sample.mask,
        behaviour=behaviour,
        cells=cells.of(sample),
        temperature=sample.temperature,
        advantage=advantage,
        weight=weight,
        experts=sample.experts,
    )


def micro_batch(items: Sequence[TrainSample]) -> MicroBatch:
    """Without items, a pass whose loss and gradients are zero."""
    items = items or [EMPTY]
    counts = torch.tensor([len(item.behaviour) for item in items])
    sequence = torch.arange(len(items)).repeat_interleave(counts)
    packed = pack([item.tokens for item in items], [item.mask for item in items], [item.temperature for item in items])
    return MicroBatch(
        msgspec.structs.replace(packed, experts=expert_ids(items)),
        advantage=torch.tensor([item.advantage for item in items])[sequence],
        weight=torch.tensor([item.weight for item in items])[sequence],
        behaviour=torch.tensor([logprob for item in items for logprob in item.behaviour]),
        cell=torch.tensor([number for item in items for number in item.cells], dtype=torch.long),
        sequence=sequence,
    )


def expert_ids(items: Sequence[TrainSample]) -> Tensor | None:
    """[tokens, layers, choices], -1 where the engine's choice is not known; None if it is known nowhere."""
    shape = next((item.experts.shape for item in items if item.experts is not None), None)
    if shape is None:
        return None
    unknown = (1 << 8 * shape.width) - 1
    data = b"".join(shape.unknown(len(item.tokens)) if item.experts is None else item.experts.data for item in items)
    ids = np.frombuffer(data, f"<u{shape.width}").astype(np.int64).reshape(-1, shape.layers, shape.choices)
    return torch.tensor(np.where(ids == unknown, -1, ids))


def plan_examples(examples: Sequence[Example], pack_tokens: int, ranks: int = 1) -> list[list[list[Example]]]:
    """The examples of each rank in each of its passes, as `plan_passes`. Raises ValueError about one that cannot be
    trained."""
    for number, example in enumerate(examples):
        if len(example.tokens) != len(example.mask):
            sizes = f"{len(example.tokens)} tokens and {len(example.mask)} mask bits"
            raise ValueError(f"example {number} has {sizes}; the numbers must agree")
    by_rank = split_over_ranks([len(example.tokens) for example in examples], pack_tokens, ranks)
    return [[[examples[i] for i in part] for part in passes] for passes in by_rank]


def pack_examples(examples: Sequence[Example]) -> Packed:
    """Without examples, a pass whose loss and gradients are zero."""
    examples = examples or [Example(EMPTY.tokens, EMPTY.mask)]
    return pack([example.tokens for example in examples], [example.mask for example in examples])
