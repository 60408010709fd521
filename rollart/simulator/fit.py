"""Fits of measured numbers: distributions for the scenario file, and the paces of engines and trainer.

A distribution is a formula where one fits the data, so that it can be read and changed; else quantiles. Paces are
fitted by non-negative least squares, and scaled to give the measured total time.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from rollart.simulator.contention import slowdown
from rollart.simulator.distributions import Distribution, LogNormal, MixturePart, Normal, draw_of, mean_of
from rollart.simulator.measurements import MeasuredGeneration, MeasuredStep
from rollart.simulator.scenario import EnginePace, TrainPace

Array = NDArray[np.float64]
Integral = Callable[[Array], Array]

CLOSE = 0.05  # maximum distance between the distribution functions of formula and data
ALIKE = 0.03  # maximum relative distance between their means: throughput follows from means
TAIL = 0.02  # share of the largest values: a batch waits for them
TAILS_ALIKE = 0.1  # maximum relative distance between the means of these
KINDS = 24  # up to this many different whole numbers are listed one by one
GAP = 3.0  # neighbours apart by this factor belong to two modes
_MODE = 0.005  # minimum share of a mode
_STEADY = 0.25  # relative deviation of batch sizes above which training time has a fixed part and one per token
_BETTER = 0.05  # share of the error that the third part of a pace must remove
_POINTS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)
_EDGE = 1e-6
_DECIMALS = 9  # numbers that differ less are equal


def distribution(values: Sequence[float], whole: bool = False) -> float | Distribution:
    """A number if all are about the same, 0 if there are none; `whole`: they are whole numbers."""
    if not values:
        return 0.0
    low, high, mean = min(values), max(values), sum(values) / len(values)
    if high - low <= 0.01 * abs(mean):
        return _digits(mean)
    if whole and len(counts := Counter(values)) <= KINDS:
        return Distribution(
            mixture=[MixturePart(share=_digits(n / len(values)), of=v) for v, n in sorted(counts.items())]
        )
    ordered = np.sort(np.asarray(values, dtype=float))
    cut = _valley(ordered)
    if cut is None:
        return _one_mode(ordered)
    parts = [ordered[:cut], ordered[cut:]]
    return Distribution(mixture=[MixturePart(share=_digits(len(part) / len(values)), of=_mode(part)) for part in parts])


def _mode(ordered: Array) -> float | Distribution:
    return _one_mode(ordered) if ordered[-1] > ordered[0] * 1.01 else _digits(float(ordered.mean()))


def _one_mode(ordered: Array) -> Distribution:
    """The closest formula if it is close enough, else quantiles."""
    ends = {"min": _digits(float(ordered[0])), "max": _digits(float(ordered[-1]))}
    mean, deviation = float(ordered.mean()), float(ordered.std())
    found = [Distribution(normal=Normal(mean=_digits(mean), sd=_digits(deviation)), **ends)]
    if ordered[0] > 0:
        logs = np.log(ordered)
        middle, sigma = _digits(float(np.exp(logs.mean()))), _digits(float(logs.std()))
        found += [Distribution(lognormal=LogNormal(median=middle, sigma=sigma), **ends)]
        found += [Distribution(exponential=_digits(mean), **ends)]
    nearest = min(found, key=lambda each: distance(each, ordered))
    close = distance(nearest, ordered) <= CLOSE and abs(mean_of(nearest) - mean) <= ALIKE * mean
    if close and abs(_tail(_evenly(nearest)) / _tail(ordered) - 1) <= TAILS_ALIKE:
        return nearest
    return Distribution(quantiles=[(p, _digits(float(np.quantile(ordered, p)))) for p in _POINTS])


def _tail(ordered: Array) -> float:
    """The mean of the largest values."""
    return float(ordered[-max(1, round(TAIL * len(ordered))) :].mean())


def _evenly(fitted: float | Distribution) -> Array:
    """Draws that stand for all of them, in order."""
    draw = draw_of(fitted)
    return np.array([draw((n + 0.5) / 2000) for n in range(2000)])


def _valley(ordered: Array) -> int | None:
    """Where the second of two modes begins: at the widest gap, if it is wide and both parts are large enough."""
    least = max(5, math.ceil(_MODE * len(ordered)))
    if len(ordered) < 2 * least or ordered[0] <= 0:
        return None
    ratios = ordered[least : len(ordered) - least + 1] / ordered[least - 1 : len(ordered) - least]
    widest = int(np.argmax(ratios))
    return least + widest if ratios[widest] >= GAP else None


def distance(fitted: float | Distribution, values: Iterable[float]) -> float:
    """The Kolmogorov distance: the largest between the two distribution functions."""
    ordered = np.sort(np.asarray(list(values), dtype=float).round(_DECIMALS))
    drawn = _evenly(fitted).round(_DECIMALS)
    at = np.concatenate([ordered, drawn])
    ours = np.searchsorted(drawn, at, side="right") / len(drawn)
    theirs = np.searchsorted(ordered, at, side="right") / len(ordered)
    return float(np.abs(ours - theirs).max())


def uncut(values: Sequence[float], cut: Sequence[float]) -> list[float]:
    """The values as if none had been cut short: one stopped at a `cut` is equally likely to have become any of the
    larger values (Kaplan and Meier). One cut beyond all of them counts as the largest."""
    if not values or not cut:
        return list(values)
    ordered, cuts = sorted(values), sorted(min(each, max(values)) for each in cut)
    weights, more, place = [], 0.0, 0
    for index, value in enumerate(ordered):
        while place < len(cuts) and cuts[place] <= value:
            place += 1
            more += (1.0 + more) / (len(ordered) - index + len(cuts) - place)  # shared equally by all that are left
        weights.append(1.0 + more)
    ends = np.cumsum(weights) / sum(weights)
    total = len(values) + len(cut)
    places = np.searchsorted(ends, (np.arange(total) + 0.5) / total)
    return [ordered[min(len(ordered) - 1, int(place))] for place in places]


@dataclass(frozen=True, slots=True)
class EngineFit:
    """`pace` without contention; `contention` is how much longer a pass takes during training. `expected` and `seconds`
    of each generation are fitted and measured."""

    pace: EnginePace
    contention: float
    expected: list[float]
    seconds: list[float]


class Crowd:
    """How many processes, engines and the trainer, worked at the same time. Without `cores`, all engines are one."""

    def __init__(
        self, generations: Iterable[MeasuredGeneration], trainings: Sequence[MeasuredStep], cores: int = 0
    ) -> None:
        spans: dict[str, list[tuple[float, float]]] = {"": [(step.began, step.ended) for step in trainings]}
        for each in generations:
            spans.setdefault(each.engine if cores else "engines", []).append((each.began, each.ended))
        joined = [span for of in spans.values() for span in _joined(of)]
        at = np.array([began for began, _ in joined] + [ended for _, ended in joined])
        order = np.argsort(at, kind="stable")
        count = np.cumsum(np.repeat([1, -1], len(joined))[order])
        self._cores, self._at = cores, at[order]
        self._count = count[:-1]

    def shares(self, began: Array, ended: Array) -> Array:
        """For each interval, the shares of its time in which 1, 2, 3... processes worked."""
        columns = []
        for working in range(1, int(self._count.max(initial=1)) + 1):
            passed = np.concatenate([[0.0], np.cumsum(np.diff(self._at) * (self._count == working))])
            until = np.interp(ended, self._at, passed) - np.interp(began, self._at, passed)
            columns.append(until / np.maximum(_EDGE, ended - began))
        return np.column_stack(columns)

    def speed(self, contention: float, shares: Array) -> Array:
        """Mean speed of work that went on while that many others did."""
        slow = [slowdown(working, contention, self._cores) for working in range(1, shares.shape[1] + 1)]
        return 1.0 - shares @ (1.0 - 1.0 / np.array(slow))


def engine(generations: Sequence[MeasuredGeneration], crowd: Crowd, chunk: int) -> EngineFit:
    """From the seconds of every generation and what its engine computed in that time.

    Each token of a response is one pass, shared with all other requests that the engine computes then."""
    columns, began, ended = _design(generations, chunk)
    seconds = ended - began
    if not len(seconds):
        return EngineFit(EnginePace(fixed=0.0, token=0.0), 0.0, [], [])
    shares = crowd.shares(began, ended)
    weights = 1.0 / np.sqrt(seconds)  # noise adds up with the length of a generation
    contentions = [n * 0.05 for n in range(41)] if shares[:, 0].std() > 0.05 else [0.0]
    fits = [
        (contention, *_paced(columns * (weights / crowd.speed(contention, shares))[:, None], seconds * weights))
        for contention in contentions
    ]
    contention, parts, _ = min(fits, key=lambda each: each[2])
    expected = (columns / crowd.speed(contention, shares)[:, None]) @ parts
    scale = seconds.sum() / expected.sum() if expected.sum() > 0 else 1.0
    fixed, token, context = (_digits(float(part) * scale) for part in parts)
    pace = EnginePace(fixed=fixed, token=token, context=context)
    return EngineFit(pace, contention, (expected * scale).tolist(), seconds.tolist())


def trainer(trainings: Sequence[MeasuredStep], contention: float, crowd: Crowd) -> TrainPace:
    """Without what it lost to engines that worked at the same time.

    If batches had about the same size, computing counts as proportional to it, and what comes before and after as
    fixed."""
    began, ended = np.array([(step.began, step.ended) for step in trainings]).T
    alone = np.array([step.seconds for step in trainings]) * crowd.speed(contention, crowd.shares(began, ended))
    around = max(0.0, median(step.ended - step.began - step.seconds for step in trainings))
    tokens = np.array([float(step.tokens) for step in trainings])
    if len(trainings) > 3 and tokens.std() > _STEADY * tokens.mean():
        parts = _positive(np.column_stack([np.ones_like(tokens), tokens]), alone)
        return TrainPace(fixed=_digits(around + float(parts[0])), token=_digits(float(parts[1])))
    each = float(alone.sum() / max(1.0, tokens.sum()))
    return TrainPace(fixed=_digits(around), token=_digits(each))


def _design(generations: Sequence[MeasuredGeneration], chunk: int) -> tuple[Array, Array, Array]:
    """For each generation its passes, the tokens computed and the KV read by its engine meanwhile; and when it began
    and ended."""
    rows, begins, ends = [np.empty((0, 3))], [np.empty(0)], [np.empty(0)]
    for name in sorted({each.engine for each in generations}):
        mine = np.array(
            [
                (each.began, each.first, each.ended, each.new, each.tokens, each.context)
                for each in generations
                if each.engine == name and each.ended > each.began and each.tokens
            ]
        ).reshape(-1, 6)
        began, _, ended, new, tokens, _ = mine.T
        computed, read = _work(mine)
        passes = tokens + np.ceil(new / chunk) - 1
        rows.append(np.column_stack([passes, computed(ended) - computed(began), read(ended) - read(began)]))
        begins.append(began)
        ends.append(ended)
    return np.concatenate(rows), np.concatenate(begins), np.concatenate(ends)


def _work(generations: Array) -> tuple[Integral, Integral]:
    """Tokens that an engine has computed, and KV that it has read, up to a time. Rows as in `_design`."""
    began, first, ended, new, tokens, context = generations.T
    first = np.maximum(first, began + _EDGE)
    decoded = (tokens > 1) & (ended > first)
    decoding = first[decoded], ended[decoded]
    after = tokens[decoded] - 1
    prefilled = np.column_stack([began, first, new])
    computed = np.concatenate([prefilled, np.column_stack([*decoding, after])])
    return _integral(computed), _integral(np.column_stack([*decoding, after * context[decoded]]))


def _joined(spans: Sequence[tuple[float, float]]) -> list[list[float]]:
    """The spans, with those that overlap made one."""
    joined: list[list[float]] = []
    for began, ended in sorted(spans):
        if joined and began <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], ended)
        else:
            joined.append([began, ended])
    return [span for span in joined if span[1] > span[0]]


def _integral(flows: Array) -> Integral:
    """The integral up to a time of amounts that each flow evenly over an interval: rows of begin, end and amount."""
    if not len(flows):
        return np.zeros_like
    began, ended, amount = flows.T
    at = np.concatenate([began, ended])
    rates = np.concatenate([amount / (ended - began), -amount / (ended - began)])
    order = np.argsort(at, kind="stable")
    at, rate = at[order], np.cumsum(rates[order])
    total = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(at))])
    return lambda t: np.interp(t, at, total)


def _paced(columns: Array, seconds: Array) -> tuple[Array, float]:
    """Seconds of a pass, of a token and of a token of KV, and the squared error. KV counts only where it
    clearly improves the fit, as a small part of the computing: else it would stand in for the pass."""
    # A few rows that have the same squared errors.
    reduced = np.asarray(np.linalg.qr(np.column_stack([columns, seconds]), mode="r"))
    columns, seconds = reduced[:, :-1], reduced[:, -1]
    simple = np.append(_positive(columns[:, :2], seconds), 0.0)
    full = _positive(columns, seconds)
    simple_error, full_error = (float(np.square(columns @ parts - seconds).sum()) for parts in (simple, full))
    if (full > 0).all() and full[2] <= full[1] / 10 and full_error < (1 - _BETTER) * simple_error:
        return full, full_error
    return simple, simple_error


def _positive(columns: Array, target: Array) -> Array:
    """Non-negative least squares: there are few columns, so all subsets are tried."""
    count = columns.shape[1]
    best, least = np.zeros(count), math.inf
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            parts = np.linalg.lstsq(columns[:, chosen], target, rcond=None)[0]
            if (parts < 0).any():
                continue
            error = float(np.square(columns[:, chosen] @ parts - target).sum())
            if error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = parts
    return best


def _digits(value: float) -> float:
    """Four significant digits: no fit is more precise."""
    return float(f"{value:.4g}")
