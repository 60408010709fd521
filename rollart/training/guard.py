"""The numerics guard: detects logprobs of the engine that are out of range, and names the likely cause.

A fresh token, sampled by the version that is trained, must agree with the trainer but for rounding; an older one drifts
with the policy, about as far as it usually does. Each cause of a disagreement has its own signature:

- top-k or top-p: the engine's logprob is never below the trainer's, because it leaves out part of the vocabulary;
- temperature: the gap is proportional to logprob + entropy, with one factor for all tokens;
- drift: the same or any other gap of older tokens alone, in a task whose fresh tokens agreed before;
- KV of older weights: only tokens that continue a conversation begun by older weights disagree;
- a version label: fresh tokens disagree from the start of a conversation on, or it is the older ones that agree.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from msgspec import Struct

from rollart.training.logprob_gap import GapRow, pool

# Mean gap of fresh tokens that rounding may explain, by the coarser dtype of engine and trainer: a few times what was
# measured, except for TF32, which has the mantissa of float16.
NOISE = {"float32": 1e-4, "bfloat16": 0.04, "float16": 0.01, "tf32": 0.01}
# Fewer prove nothing: a handful may be off to the same side by chance, and older ones by what they taught.
MIN_TOKENS, MIN_STALE_TOKENS = 16, 256
# Older tokens are out of range at DRIFT_FACTOR times their usual mean gap, and at DRIFT_MIN_GAP at least.
DRIFT_FACTOR, DRIFT_MIN_GAP = 5.0, 0.05
# Whatever is usual, a mean gap for each version of age at which runs hardly learn: most that do have 0.003 to 0.12.
# Some learn fast with more, so it must last for RUINOUS_STEPS in which the reward does not rise.
RUINOUS_GAP, RUINOUS_STEPS = 0.35, 4
HISTORY, MIN_HISTORY = 20, 5
STANDARD_ERRORS = 3.0  # by which a mean must exceed that limit: it may be one of few tokens, and gaps have long tails
# Share of the squared gaps that one temperature factor must explain: more if the policy has moved as well.
FACTOR_SHARE, FACTOR_SHARE_STALE = 0.7, 0.9
MIN_LOG_FACTOR = 0.09  # a policy that becomes more certain looks like a slightly lower temperature
MIN_LOG_DRIFT = 0.4  # a policy that changes by half its temperature within a few updates is no longer learning
REPEAT_STEPS = 50


class Cause(StrEnum):
    CUT = "top-k or top-p"
    TEMPERATURE = "temperature"
    STALE_KV = "stale KV"
    LABEL = "version label"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cause: Cause
    task: str
    row: GapRow
    reason: str


class GuardState(Struct, frozen=True):
    """For a checkpoint: usual gaps by task and age, the last step at which each cause was reported for a task, the
    tasks whose fresh tokens agreed, how many steps the gap of a task has been ruinous, and its rewards."""

    usual: tuple[tuple[str, int, tuple[float, ...]], ...] = ()
    reported: tuple[tuple[Cause, str, int], ...] = ()
    agreed: tuple[str, ...] = ()
    ruinous: dict[str, int] = {}
    rewards: dict[str, tuple[float, ...]] = {}


def coarser(*dtypes: str) -> str:
    return max(dtypes, key=NOISE.__getitem__)


class Guard:
    """Call `check` with the cells of each step. It keeps the usual gaps, and what it reported lately."""

    def __init__(self, dtype: str = "float32") -> None:
        self._noise = NOISE[dtype]
        self._usual: dict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))
        self._reported: dict[tuple[Cause, str], int] = {}
        self._agreed: set[str] = set()
        self._ruinous: dict[str, int] = defaultdict(int)
        self._rewards: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def check(self, step: int, rows: Sequence[GapRow], rewards: Mapping[str, float] | None = None) -> tuple[str, ...]:
        """Warnings about what is new, or still wrong after REPEAT_STEPS. `rewards` are the means of the tasks."""
        warnings = []
        for task, reward in (rewards or {}).items():
            self._rewards[task].append(reward)
        for task in sorted({row.cell.task for row in rows}):
            mine = [row for row in rows if row.cell.task == task]
            diagnosis = self._diagnosis(task, mine)
            for row in _by_age(mine):
                self._usual[task, row.cell.age].append(row.mean)
            if diagnosis is None or step - self._reported.get((diagnosis.cause, task), -REPEAT_STEPS) < REPEAT_STEPS:
                continue
            self._reported[diagnosis.cause, task] = step
            warnings.append(_sentence(diagnosis))
        return tuple(warnings)

    def state(self) -> GuardState:
        return GuardState(
            tuple((task, age, tuple(means)) for (task, age), means in self._usual.items() if means),
            tuple((cause, task, step) for (cause, task), step in self._reported.items()),
            tuple(sorted(self._agreed)),
            {task: steps for task, steps in self._ruinous.items() if steps},
            {task: tuple(values) for task, values in self._rewards.items()},
        )

    def restore(self, state: GuardState) -> None:
        self._usual.clear()
        for task, age, means in state.usual:
            self._usual[task, age].extend(means)
        self._reported = {(cause, task): step for cause, task, step in state.reported}
        self._agreed = set(state.agreed)
        self._ruinous.clear()
        self._ruinous.update(state.ruinous)
        self._rewards.clear()
        for task, values in state.rewards.items():
            self._rewards[task].extend(values)

    def _diagnosis(self, task: str, rows: Sequence[GapRow]) -> Diagnosis | None:
        """Sampling settings do not change in the middle of a run: what was right for fresh tokens is right for older
        ones, so it is the policy that moved."""
        fresh = [row for row in rows if row.cell.age == 0]
        if sum(row.tokens for row in fresh) >= MIN_TOKENS and all(row.mean <= self._noise for row in fresh):
            self._agreed.add(task)
        found = diagnose(rows, self._noise)
        if found is not None and found.row.cell.age > 0 and task in self._agreed:
            found = _sharpened(found.row)
        return found or self._leapt(rows) or self._ruined(task, rows)

    def _leapt(self, rows: Sequence[GapRow]) -> Diagnosis | None:
        """One update moved the policy much further than those before it did."""
        for row in _by_age(rows):
            usual = self._usual[row.cell.task, row.cell.age]
            if row.tokens < MIN_TOKENS or len(usual) < MIN_HISTORY:
                continue
            middle = median(usual)
            if row.mean - STANDARD_ERRORS * row.error > max(DRIFT_MIN_GAP, DRIFT_FACTOR * middle):
                return _drift(
                    row,
                    "the last update moved the policy far: lower training.lr or training.grad_clip, unless tokens "
                    "carry the wrong version",
                    f"{row.mean / max(middle, 1e-12):.0f} times what is usual",
                )
        return None

    def _ruined(self, task: str, rows: Sequence[GapRow]) -> Diagnosis | None:
        """Every update moves the policy too far to learn from what it said before."""
        older = [row for row in _by_age(rows) if row.tokens >= MIN_TOKENS]
        far = [row for row in older if row.mean - STANDARD_ERRORS * row.error > RUINOUS_GAP * row.cell.age]
        if older:  # a step with fresh tokens alone says nothing
            self._ruinous[task] = self._ruinous[task] + 1 if far else 0
        if not far or self._ruinous[task] < RUINOUS_STEPS or rises(self._rewards[task]):
            return None
        return _drift(
            far[0],
            "each update moves the policy too far to learn from what it said before: lower training.lr, or raise "
            "training.batch_groups",
            f"where a few hundredths are usual, and so for {self._ruinous[task]} steps without a rising reward",
        )


def rises(rewards: Sequence[float]) -> bool:
    """Whether the latest of them are above the first, and have kept at least half of the best that was gained.

    >>> rises([0.2, 0.3, 0.4, 0.5]), rises([0.2, 0.5, 0.6, 0.3, 0.3]), rises([0.3] * 8)
    (True, False, False)
    """
    size = min(len(rewards) // 2, RUINOUS_STEPS)
    if not size:
        return False
    values = list(rewards)
    means = [fmean(values[at : at + size]) for at in range(len(values) - size + 1)]
    return means[-1] > means[0] and means[-1] >= (means[0] + max(means)) / 2


def diagnose(rows: Sequence[GapRow], noise: float) -> Diagnosis | None:
    """Why one task's tokens are off by more than `noise`, if they are. Needs no history."""
    fresh = [row for row in rows if row.cell.age == 0]
    stale = [row for row in rows if row.cell.age > 0]
    if not fresh or sum(row.tokens for row in fresh) < MIN_TOKENS:
        return _sampling_rule(stale, noise, FACTOR_SHARE_STALE, MIN_STALE_TOKENS)
    if all(row.mean <= noise for row in fresh):
        return None
    return _sampling_rule(fresh, noise, FACTOR_SHARE, MIN_TOKENS) or _other_weights(fresh, stale, noise)


def _sampling_rule(rows: Sequence[GapRow], noise: float, share: float, min_tokens: int) -> Diagnosis | None:
    """A gap that top-k, top-p or temperature explains, the same for all tokens."""
    if not rows:
        return None
    row = pool(rows)
    if row.mean <= noise or row.tokens < min_tokens:
        return None
    if row.lowest > -noise:
        reason = (
            "and never below the trainer's: the engine cuts the vocabulary with top-k or top-p, which the trainer "
            "does not; set the task's top_k to 0 and top_p to 1"
        )
        return Diagnosis(Cause.CUT, row.cell.task, row, reason)
    factor = _temperature_factor(row, share)
    if factor is not None and abs(math.log(factor)) > MIN_LOG_FACTOR:
        reason = (
            f"as if the engine sampled at {factor:.2g} times the temperature given to the trainer: check the "
            "task's sampling.temperature, and that the engine returns logprobs after temperature (vLLM: "
            "processed_logprobs)"
        )
        return Diagnosis(Cause.TEMPERATURE, row.cell.task, row, reason)
    return None


def _temperature_factor(row: GapRow, share: float) -> float | None:
    """Of the engine's temperature over the trainer's, if it explains that share of the squared gaps."""
    if row.gap_slope**2 <= share * row.slope_slope * row.gap_gap:
        return None
    return math.exp(-row.gap_slope / row.slope_slope)


def _sharpened(row: GapRow) -> Diagnosis | None:
    """A policy that became far more or less certain within the age of its tokens."""
    factor = _temperature_factor(row, FACTOR_SHARE_STALE)
    if factor is None or abs(math.log(factor)) <= MIN_LOG_DRIFT:
        return None
    what = "certain, which leaves it few answers to learn from" if factor > 1 else "random"
    return _drift(
        row,
        f"the last updates made the policy far more {what}: lower training.lr, or raise training.batch_groups",
        f"as a temperature of {1 / factor:.2g} would, and tokens of the newest weights agreed before",
    )


def _drift(row: GapRow, what: str, evidence: str) -> Diagnosis:
    """What happened and what to do come first, for views that cut."""
    reason = (
        f"{what}. Logprobs of {row.tokens} tokens of older weights changed by {row.mean:.2g} on average and "
        f"{row.peak:.2g} at most, {evidence}"
    )
    return Diagnosis(Cause.DRIFT, row.cell.task, row, reason)


def _other_weights(fresh: Sequence[GapRow], stale: Sequence[GapRow], noise: float) -> Diagnosis:
    """Fresh tokens that other weights contributed to."""
    row = pool(fresh)
    begun = [each for each in fresh if not each.cell.continued]
    if stale and pool(stale).mean <= noise:
        reason = (
            "while tokens labelled as older agree with the weights that are trained: the version labels are mixed up; "
            "check which version the engine stamps on a token when it swaps"
        )
        return Diagnosis(Cause.LABEL, row.cell.task, row, reason)
    if not begun or pool(begun).mean <= noise:
        agree = "while those of conversations that began with them agree" if begun else "all after older tokens"
        reason = (
            f"{agree}: they were computed on KV of older weights; set engine.on_swap to recompute, and check that the "
            "engine's prefix cache is reset when its weights change"
        )
        return Diagnosis(Cause.STALE_KV, row.cell.task, pool([each for each in fresh if each.cell.continued]), reason)
    reason = (
        "from the start of their conversations on: the version label is wrong (the engine swapped later than it says, "
        "or not at all), or a prefix shared with older conversations was kept across the swap"
    )
    return Diagnosis(Cause.LABEL, row.cell.task, row, reason)


def _sentence(diagnosis: Diagnosis) -> str:
    row = diagnosis.row
    if diagnosis.cause is Cause.DRIFT:
        return f"{diagnosis.cause}: in task {diagnosis.task} {diagnosis.reason}"
    age = "sampled by the weights being trained" if row.cell.age == 0 else "of older weights"
    return (
        f"{diagnosis.cause}: in task {diagnosis.task} the engine's logprobs are off by {row.mean:.2g} on average and "
        f"{row.peak:.2g} at most, over {row.tokens} tokens {age}, {diagnosis.reason}"
    )


def _by_age(rows: Sequence[GapRow]) -> list[GapRow]:
    ages = sorted({row.cell.age for row in rows if row.cell.age > 0})
    return [pool([row for row in rows if row.cell.age == age]) for age in ages]
