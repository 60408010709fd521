"""From a batch to micro-batches: the samples that have a gradient, split over the ranks and packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from rollart.core.column import Column
from rollart.core.expert_choice import ExpertChoices
from rollart.core.teaching import Teaching
from rollart.core.types import Batch, Example, Sample, TokenRole
from rollart.training.advantages import Assessed
from rollart.training.algorithms import Algorithms
from rollart.training.logprob_gap import Cells
from rollart.training.losses import token_weights
from rollart.training.packing import Packed, deal, families, pack, split_over_ranks

Advantages = Sequence[Sequence[NDArray[np.float32]]]  # for each group and sample, one value per action token


class TrainSample(Struct, frozen=True, array_like=True, gc=False):
    """A sample as a rank trains it. The columns after `mask` have an entry for every trained token: those that the
    policy sampled, and those that are imitated. `sampled` tells them apart (None: all were sampled).

    There are three streams, and a trained token has a weight in each. `weight` is that of a sampled token in the policy
    gradient, `anchor` in the KL to the reference; `imitate` has the weights in the cross entropy. `behaviour` has the
    engine's logprobs, `cells` the numbers of logprob-gap cells, `turn` those of turns within the trajectory. `experts`
    are those that the engine used, with a row for every token. With a critic, `value` is what it said before the token,
    `target` what it should say and `assess` the weight in its loss, 0 where it is not asked. `algorithm` is the number
    of its task's among those of the run."""

    tokens: Column
    mask: Column
    behaviour: Column
    cells: Column
    advantage: Column
    temperature: float = 1.0
    weight: float = 0.0
    anchor: float = 0.0
    reward: float = 0.0
    turn: Column | None = None
    sampled: Column | None = None
    imitate: Column | None = None
    teacher: Teaching | None = None
    experts: ExpertChoices | None = None
    algorithm: int = 0
    value: Column | None = None
    target: Column | None = None
    assess: Column | None = None

    @property
    def actions(self) -> int:
        """Trained tokens that the policy sampled."""
        return len(self.behaviour) if self.sampled is None else int(self.sampled.array.sum())


CRITIC_COLUMNS = ("value", "target", "assess")
NONE = Column.floats(())
EMPTY = TrainSample(
    tokens=Column.ints([0]), mask=Column.flags([0]), behaviour=NONE, cells=Column.ints(()), advantage=NONE
)


@dataclass(slots=True)
class MicroBatch:
    """One forward pass. The tensors are flat, one entry per trained token; `sequence` and `turn` number from 0, `turn`
    through all sequences. The sum of `weight` over all tokens of an update's micro-batches is at most 1: samples left
    out keep their share. So it is for `anchor` and `imitate`. `sampled` is None if all were sampled. With
    `teacher_top`, [tokens, count], the teacher's likeliest tokens are predicted after each trained token.
    `proximal` is the policy's before the first update of the batch; `reference` is there only if something needs it, as
    are `value`, `target` and `assess` for a critic.
    """

    packed: Packed
    advantage: Tensor
    weight: Tensor
    anchor: Tensor
    behaviour: Tensor
    cell: Tensor
    sequence: Tensor
    turn: Tensor
    reward: Tensor
    sampled: Tensor | None = None
    imitate: Tensor | None = None
    teacher: Tensor | None = None
    teacher_top: Tensor | None = None
    algorithm: Tensor | int = 0
    proximal: Tensor | None = None
    reference: Tensor | None = None
    value: Tensor | None = None
    target: Tensor | None = None
    assess: Tensor | None = None

    def of_sampled(self, values: Tensor) -> Tensor:
        """Without the tokens that are imitated only."""
        return values if self.sampled is None else values[self.sampled]

    def algorithms(self) -> list[int]:
        """The numbers of those that its sampled tokens are trained with; one at least."""
        if isinstance(self.algorithm, int):
            return [self.algorithm]
        return sorted({*self.of_sampled(self.algorithm).tolist()})

    def selector(self, algorithm: int) -> Callable[[Tensor], Tensor]:
        """Leaves the sampled tokens of one algorithm."""
        if isinstance(self.algorithm, int):
            return self.of_sampled
        chosen = self.algorithm == algorithm
        mask = chosen if self.sampled is None else chosen & self.sampled
        return lambda values: values[mask]

    def of_targets(self, values: Tensor) -> Tensor:
        """Without the rows of a teacher's likeliest tokens, which follow that of each trained token."""
        return values if self.teacher_top is None else values.view(-1, 1 + self.teacher_top.shape[1])[:, 0]


def check_batch(batch: Batch) -> None:
    """Raises ValueError about the first sample that cannot be trained."""
    if not any(group.samples for group in batch.groups):
        raise ValueError(f"the batch of step {batch.step} holds no samples")
    for group in batch.groups:
        for sample in group.samples:
            actions = sample.roles.data.count(TokenRole.ACTION)
            if len(sample.tokens) != len(sample.roles) or {len(sample.logprobs), len(sample.versions)} != {actions}:
                raise ValueError(
                    f"sample {sample.id} has {len(sample.tokens)} tokens and {len(sample.roles)} roles, and for its "
                    f"{actions} action tokens {len(sample.logprobs)} logprobs and {len(sample.versions)} versions; "
                    "the numbers must agree"
                )


def split_into_mini_batches(
    batch: Batch, advantages: Advantages, updates: int, algorithms: Algorithms
) -> list[list[int]]:
    """The groups of each update. Groups stay whole; each update gets as many as any other, give or take one, as many
    that have a gradient, and about as many tokens. There are fewer updates if fewer groups have a gradient: one without
    any would move the weights by momentum alone."""
    tokens = [
        sum(
            len(sample.tokens)
            for sample, row in zip(group.samples, rows, strict=True)
            if _trains(sample, row, algorithms)
        )
        for group, rows in zip(batch.groups, advantages, strict=True)
    ]
    count = max(1, min(updates, sum(map(bool, tokens))))
    return [sorted(part) for part in deal(tokens, count)]


def _trains(sample: Sample, advantage: NDArray[np.float32], algorithms: Algorithms) -> bool:
    """Whether it can have a gradient."""
    kept = algorithms.of(sample.task).keeps_all
    return bool(sample.imitate is not None or (sample.actions and (kept or advantage.any())))


def _weights(samples: Sequence[Sample], owners: Sequence[int], algorithms: Algorithms) -> list[float]:
    """Of each token of every sample. Where tasks aggregate in different ways, each way has the share of its groups."""
    known: dict[tuple[int, str], int] = {}
    sequences = [known.setdefault((owner, s.owner), len(known)) for owner, s in zip(owners, samples, strict=True)]
    ways = [algorithms.of(sample.task).config.aggregate for sample in samples]
    weights = [0.0] * len(samples)
    for way in dict.fromkeys(ways):
        chosen = [i for i, each in enumerate(ways) if each == way]
        lengths, groups = [samples[i].actions for i in chosen], [owners[i] for i in chosen]
        share = len({*groups}) / len({*owners})
        for i, weight in zip(chosen, token_weights(lengths, groups, way, [sequences[i] for i in chosen]), strict=True):
            weights[i] = share * weight
    return weights


def plan_passes(
    batch: Batch,
    advantages: Advantages,
    cells: Cells,
    *,
    algorithms: Algorithms,
    pack_tokens: int,
    ranks: int = 1,
    share: bool = False,
    pairs: bool = False,
    assessed: Assessed | None = None,
) -> list[list[list[TrainSample]]]:
    """The samples of each rank in each of its passes. All ranks have the same number of passes; some may be empty.

    `advantages` has one value for each action token of each sample of a group. A sample whose values are all 0 has no
    gradient and is left out, unless its algorithm keeps all (KL, entropy, a critic). With `share` those that begin with
    the same prompt come into the same pass; `pairs`, two samples in a row, always do.
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    values = [row for rows in advantages for row in rows]
    owners = [number for number, group in enumerate(batch.groups) for _ in group.samples]
    weights = _weights(samples, owners, algorithms)
    imitated = sum(int(np.count_nonzero(sample.imitate.array)) for sample in samples if sample.imitate is not None)
    chosen = [i for i, sample in enumerate(samples) if _trains(sample, values[i], algorithms)]
    items = [
        _train_sample(samples[i], cells, values[i], weights[i], algorithms.number(samples[i].task)) for i in chosen
    ]
    if assessed is not None:
        said = [row for rows in assessed.values for row in rows]
        wanted = [row for rows in assessed.targets for row in rows]
        asked = 1 / max(1, sum(int(np.isfinite(row).sum()) for row in wanted))
        items = [_with_critic(item, said[i], wanted[i], asked) for item, i in zip(items, chosen, strict=True)]
    items = [
        item if (learnt := samples[i].imitate) is None else _with_imitation(item, learnt, imitated)
        for item, i in zip(items, chosen, strict=True)
    ]
    tokens = [item.tokens.array for item in items]
    together = families(tokens, [item.mask.array for item in items], pack_tokens) if share and not pairs else None
    if pairs:
        together = [sorted((at, at + 1), key=lambda i: -len(tokens[i])) for at in range(0, len(items), 2)]
    by_rank = split_over_ranks([len(each) for each in tokens], pack_tokens, ranks, together)
    return [[[items[i] for i in part] for part in passes] for passes in by_rank]


def _train_sample(
    sample: Sample, cells: Cells, advantage: NDArray[np.float32], weight: float, algorithm: int
) -> TrainSample:
    lengths = [turn.stop - turn.start for turn in sample.turns]
    turn = np.repeat([turn.number for turn in sample.turns], lengths) if lengths else np.zeros(sample.actions)
    return TrainSample(
        tokens=sample.tokens,
        mask=Column.flags(sample.mask),
        behaviour=sample.logprobs,
        cells=cells.of(sample),
        advantage=Column.floats(advantage),
        temperature=sample.temperature,
        weight=weight,
        anchor=weight,
        reward=sample.reward,
        turn=Column.ints(turn),
        teacher=sample.teacher,
        experts=sample.experts,
        algorithm=algorithm,
    )


def _with_critic(
    item: TrainSample, values: NDArray[np.float32], targets: NDArray[np.float32], share: float
) -> TrainSample:
    """`share` is the weight of each value that is asked for."""
    asked = np.isfinite(targets)
    return msgspec.structs.replace(
        item,
        value=Column.floats(values),
        target=Column.floats(np.where(asked, targets, values)),
        assess=Column.floats(asked * np.float32(share)),
    )


def _with_imitation(item: TrainSample, imitate: Column, count: int) -> TrainSample:
    """Also trains the tokens that have a weight in `imitate`; `count` is the number of these in the update."""
    actions, weights = item.mask.array.astype(bool), imitate.array
    trained = actions | (weights != 0)
    sampled = actions[trained]

    def spread(column: Column) -> Column:
        out = np.zeros(len(sampled), column.array.dtype)
        out[sampled] = column.array
        return Column.of(column.kind, out)

    return msgspec.structs.replace(
        item,
        mask=Column.flags(trained),
        behaviour=spread(item.behaviour),
        cells=spread(item.cells),
        advantage=spread(item.advantage),
        turn=None if item.turn is None else spread(item.turn),
        value=None if item.value is None else spread(item.value),
        target=None if item.target is None else spread(item.target),
        assess=None if item.assess is None else spread(item.assess),
        sampled=Column.flags(sampled),
        imitate=Column.floats(weights[trained] / max(1, count)),
    )


def micro_batch(items: Sequence[TrainSample], *, share: bool = False) -> MicroBatch:
    """Without items, a pass whose loss and gradients are zero. With `share` a common prompt is in it once."""
    items = items or [EMPTY]
    counts = np.array([len(item.behaviour) for item in items])
    sequence = np.arange(len(items)).repeat(counts)
    temperatures = [item.temperature for item in items]
    packed = pack([item.tokens.array for item in items], [item.mask.array for item in items], temperatures, share=share)
    packed, teacher, top = _with_teacher(items, packed)
    sampled = None
    if any(item.sampled is not None for item in items):
        sampled = _joined([item.sampled for item in items], counts, fill=1).bool()
    critic: dict[str, Tensor] = {}
    if any(item.value is not None for item in items) or items == [EMPTY]:
        critic = {name: _joined([getattr(item, name) for item in items], counts) for name in CRITIC_COLUMNS}
    imitate = None
    if any(item.imitate is not None for item in items):
        imitate = _joined([item.imitate for item in items], counts, fill=0.0)

    def by_sequence(values: list[float]) -> Tensor:
        flat = torch.tensor(np.array(values, np.float32)[sequence])
        return flat if sampled is None else flat * sampled

    return MicroBatch(
        msgspec.structs.replace(packed, experts=expert_ids(items)),
        advantage=_joined([item.advantage for item in items], counts),
        weight=by_sequence([item.weight for item in items]),
        anchor=by_sequence([item.anchor for item in items]),
        behaviour=_joined([item.behaviour for item in items], counts),
        cell=_joined([item.cells for item in items], counts).long(),
        sequence=torch.tensor(sequence),
        turn=torch.tensor(_turns([item.turn for item in items], sequence)),
        reward=torch.tensor(np.array([item.reward for item in items], np.float32)[sequence]),
        sampled=sampled,
        imitate=imitate,
        teacher=teacher,
        teacher_top=top,
        algorithm=_algorithm([item.algorithm for item in items], sequence),
        **critic,
    )


def _algorithm(numbers: Sequence[int], sequence: NDArray[np.int64]) -> Tensor | int:
    return numbers[0] if len({*numbers}) == 1 else torch.tensor(np.array(numbers)[sequence])


def _with_teacher(items: Sequence[TrainSample], packed: Packed) -> tuple[Packed, Tensor | None, Tensor | None]:
    """The teacher's logprobs of all trained tokens, if every sample has them, and of its likeliest tokens, which are
    then predicted too."""
    teachers = [item.teacher for item in items if item.teacher is not None]
    if len(teachers) < len(items) or any(item.sampled is not None for item in items):
        return packed, None, None
    logprobs = torch.tensor(np.concatenate([one.logprobs.array for one in teachers]))
    count = min(one.count for one in teachers)
    if not count:
        return packed, logprobs, None
    ids, tops = (
        torch.tensor(np.concatenate([column.array.reshape(-1, one.count)[:, :count] for one, column in columns]))
        for columns in (
            [(one, one.top_ids) for one in teachers if one.top_ids is not None],
            [(one, one.top_logprobs) for one in teachers if one.top_logprobs is not None],
        )
    )
    heat = packed.temperature
    wide = msgspec.structs.replace(
        packed,
        predict=packed.predict.repeat_interleave(1 + count),
        targets=torch.cat([packed.targets[:, None], ids.long()], 1).flatten(),
        temperature=None if heat is None else heat.repeat_interleave(1 + count),
    )
    return wide, logprobs, tops


def _joined(columns: Sequence[Column | None], counts: NDArray[np.int64], fill: float = 0.0) -> Tensor:
    """End to end; a column that is missing has `fill` everywhere."""
    kind = next((column.array.dtype for column in columns if column is not None), np.dtype(np.float32))
    parts = [
        np.full(count, fill, kind) if column is None else column.array
        for column, count in zip(columns, counts, strict=True)
    ]
    return torch.tensor(np.concatenate(parts))


def _turns(columns: Sequence[Column | None], sequence: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers the turns of all sequences from 0."""
    numbers = [column.array for column in columns if column is not None]
    if len(numbers) < len(columns):
        return sequence
    turn = np.concatenate(numbers).astype(np.int64)
    _, flat = np.unique(sequence * (1 + turn.max(initial=0)) + turn, return_inverse=True)
    return flat


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
    examples = examples or [Example([0], [0])]
    return pack([example.tokens for example in examples], [example.mask for example in examples])
