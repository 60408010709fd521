"""The numerics guard: notices when the engine's logprobs leave the range they should be in, and says what to suspect.

A fresh token, made by the very version that is trained, must agree with the trainer but for the rounding of the
engine's dtype; an older one drifts with the policy, about as far as it usually does. What does not agree leaves a trace
that tells the causes apart:

- top-k or top-p: the engine's logprob is never below the trainer's, because it leaves out part of the vocabulary;
- temperature: the gap is proportional to logprob + entropy, with one factor for all tokens;
- KV of older weights: only tokens that continue a conversation of older weights disagree;
- a version label: fresh tokens disagree from the start of a conversation on, or it is the older ones that agree.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from msgspec import Struct

from rollart.training.logprob_gap import GapRow, pooled

NOISE = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.01}
"""Mean gap of fresh tokens, by the engine's dtype, that rounding may explain; a few times what was measured."""

LEAST_TOKENS, LEAST_STALE = 16, 256
"""Fewer say nothing: a handful may all be off to the same side by chance, and older ones by what they taught."""

HISTORY, LEAST_HISTORY = 20, 5
UNUSUAL, DRIFT = 5.0, 0.05
"""Older tokens are out of range at this many times their usual mean gap, and at this gap at least."""

SURE = 3.0
"""Standard errors by which a mean must be beyond that: it may be one of few tokens, and gaps have long tails."""

REPEAT = 50
ONE_FACTOR, ONE_FACTOR_STALE = 0.7, 0.9
"""Share of the squared gaps that one factor must explain: more where the policy has moved as well."""

LEAST_FACTOR = 0.09
"""Logarithm of the smallest factor that is one: a policy that gets surer of itself looks like a slightly lower one."""


class Cause(StrEnum):
    CUT = "top-k or top-p"
    TEMPERATURE = "temperature"
    STALE_KV = "stale KV"
    LABEL = "version label"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class Finding:
    cause: Cause
    task: str
    row: GapRow
    reason: str


class Memory(Struct, frozen=True):
    """What a guard knows, for a checkpoint: usual gaps by task and age, and when what was said about which task."""

    usual: tuple[tuple[str, int, tuple[float, ...]], ...] = ()
    said: tuple[tuple[Cause, str, int], ...] = ()


class Guard:
    """Call `check` with the cells of each step. It remembers what is usual, and what it has said lately."""

    def __init__(self, dtype: str = "float32") -> None:
        self._noise = NOISE[dtype]
        self._usual: dict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._said: dict[tuple[Cause, str], int] = {}

    def check(self, step: int, rows: Sequence[GapRow]) -> tuple[str, ...]:
        """Sentences about what is new, or is still wrong after a while."""
        told = []
        for task in sorted({row.cell.task for row in rows}):
            mine = [row for row in rows if row.cell.task == task]
            finding = diagnose(mine, self._noise) or next(self._drifted(mine), None)
            self._remember(mine)
            if finding is None or step - self._said.get((finding.cause, task), -REPEAT) < REPEAT:
                continue
            self._said[finding.cause, task] = step
            told.append(_sentence(finding))
        return tuple(told)

    def memory(self) -> Memory:
        return Memory(
            tuple((task, age, tuple(means)) for (task, age), means in self._usual.items() if means),
            tuple((cause, task, step) for (cause, task), step in self._said.items()),
        )

    def recall(self, memory: Memory) -> None:
        """Be the guard whose memory that was."""
        self._usual.clear()
        for task, age, means in memory.usual:
            self._usual[task, age].extend(means)
        self._said = {(cause, task): step for cause, task, step in memory.said}

    def _drifted(self, rows: Sequence[GapRow]) -> Iterator[Finding]:
        for row in _by_age(rows):
            usual = self._usual[row.cell.task, row.cell.age]
            if len(usual) < LEAST_HISTORY or row.tokens < LEAST_TOKENS:
                continue
            middle = median(usual)
            if row.mean - SURE * row.error > max(DRIFT, UNUSUAL * middle):
                reason = (
                    f"{row.mean / max(middle, 1e-12):.0f} times what is usual for tokens {row.cell.age} versions old: "
                    "the last update moved the policy far (training.lr, training.grad_clip), or tokens carry the "
                    "wrong version"
                )
                yield Finding(Cause.DRIFT, row.cell.task, row, reason)

    def _remember(self, rows: Sequence[GapRow]) -> None:
        for row in _by_age(rows):
            if row.cell.age > 0:
                self._usual[row.cell.task, row.cell.age].append(row.mean)


def diagnose(rows: Sequence[GapRow], noise: float) -> Finding | None:
    """What is wrong with one task's tokens beyond `noise`, if anything is. Needs no history."""
    fresh = [row for row in rows if row.cell.age == 0]
    stale = [row for row in rows if row.cell.age > 0]
    if not fresh or sum(row.tokens for row in fresh) < LEAST_TOKENS:
        return _one_rule(stale, noise, ONE_FACTOR_STALE, LEAST_STALE)
    if all(row.mean <= noise for row in fresh):
        return None
    return _one_rule(fresh, noise, ONE_FACTOR, LEAST_TOKENS) or _other_weights(fresh, stale, noise)


def _one_rule(rows: Sequence[GapRow], noise: float, share: float, least: int) -> Finding | None:
    """A gap that one rule of sampling explains, the same for all tokens."""
    if not rows:
        return None
    row = pooled(rows)
    if row.mean <= noise or row.tokens < least:
        return None
    if row.lowest > -noise:
        reason = (
            "and never below the trainer's: the engine cuts the vocabulary with top-k or top-p, which the trainer "
            "does not; set the task's top_k to 0 and top_p to 1"
        )
        return Finding(Cause.CUT, row.cell.task, row, reason)
    if row.lean**2 > share * row.leans * row.squares and abs(row.lean) > LEAST_FACTOR * row.leans:
        factor = math.exp(-row.lean / row.leans)
        reason = (
            f"as if the engine sampled at {factor:.2g} times the temperature that the trainer was told: check the "
            "task's sampling.temperature, and that the engine gives logprobs after temperature (vLLM: "
            "processed_logprobs)"
        )
        return Finding(Cause.TEMPERATURE, row.cell.task, row, reason)
    return None


def _other_weights(fresh: Sequence[GapRow], stale: Sequence[GapRow], noise: float) -> Finding:
    """Fresh tokens that other weights had a part in."""
    row = pooled(fresh)
    begun = [each for each in fresh if not each.cell.continued]
    if stale and pooled(stale).mean <= noise:
        reason = (
            "while tokens labelled as older agree with the weights that are trained: the version labels are mixed up; "
            "check which version the engine stamps on a token when it swaps"
        )
        return Finding(Cause.LABEL, row.cell.task, row, reason)
    if not begun or pooled(begun).mean <= noise:
        agree = "while those of conversations that began with them agree" if begun else "all after older tokens"
        reason = (
            f"{agree}: they were computed on KV of older weights; set engine.on_swap to recompute, and see that the "
            "engine's prefix cache is reset when its weights change"
        )
        return Finding(Cause.STALE_KV, row.cell.task, pooled([each for each in fresh if each.cell.continued]), reason)
    reason = (
        "from the start of their conversations on: the version label is wrong (the engine swapped later than it says, "
        "or not at all), or a prefix shared with older conversations was kept over the swap"
    )
    return Finding(Cause.LABEL, row.cell.task, row, reason)


def _sentence(finding: Finding) -> str:
    row = finding.row
    age = "made by the weights being trained" if row.cell.age == 0 else "of older weights"
    return (
        f"{finding.cause}: in task {finding.task} the engine's logprobs are off by {row.mean:.2g} on average and "
        f"{row.peak:.2g} at most, over {row.tokens} tokens {age}, {finding.reason}"
    )


def _by_age(rows: Sequence[GapRow]) -> list[GapRow]:
    ages = sorted({row.cell.age for row in rows if row.cell.age > 0})
    return [pooled([row for row in rows if row.cell.age == age]) for age in ages]
