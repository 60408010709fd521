"""A batch made ready to train: packed micro-batches of the samples that can move the policy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollart.training.losses import token_weights
from rollart.training.packing import Packed, pack, plan
from rollart.types import Batch, Sample


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


def micro_batches(
    batch: Batch, advantages: Sequence[Sequence[float]], aggregate: str, pack_tokens: int, keep_all: bool
) -> list[MicroBatch]:
    """Pack the batch. A sample of advantage 0 has no gradient and is left out, unless `keep_all` (KL, entropy)."""
    samples: list[Sample] = []
    owners: list[int] = []
    values: list[float] = []
    for number, (group, members) in enumerate(zip(batch.groups, advantages, strict=True)):
        samples += group.samples
        owners += [number] * len(group.samples)
        values += members
    lengths = [sum(sample.mask) for sample in samples]
    weights = token_weights(lengths, owners, aggregate)
    chosen = [i for i, length in enumerate(lengths) if length and (keep_all or values[i] != 0.0)]
    return [
        _micro_batch(
            [samples[chosen[i]] for i in part],
            [values[chosen[i]] for i in part],
            [weights[chosen[i]] for i in part],
        )
        for part in plan([len(samples[i].tokens) for i in chosen], pack_tokens)
    ]


def _micro_batch(samples: Sequence[Sample], advantages: Sequence[float], weights: Sequence[float]) -> MicroBatch:
    packed = pack(
        [sample.tokens for sample in samples],
        [sample.mask for sample in samples],
        [sample.temperature for sample in samples],
    )
    counts = torch.tensor([sum(sample.mask) for sample in samples])
    sequence = torch.arange(len(samples)).repeat_interleave(counts)
    behaviour = [
        logprob for sample in samples for logprob, bit in zip(sample.logprobs, sample.mask, strict=True) if bit
    ]
    return MicroBatch(
        packed,
        advantage=torch.tensor(advantages)[sequence],
        weight=torch.tensor(weights)[sequence],
        behaviour=torch.tensor(behaviour),
        sequence=sequence,
    )
