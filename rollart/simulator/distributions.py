"""Distributions of the scenario file, for durations and counts.

Every distribution is its inverse distribution function, so one uniform number makes one draw. A trajectory draws the
same numbers under every schedule and on every cluster, so comparisons are fair.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from statistics import NormalDist
from typing import Annotated

from pydantic import Field, model_validator

from rollart.config.base import Conflict, Section

Draw = Callable[[float], float]

_EDGE = 1e-9
_STANDARD = NormalDist()
_POINTS = 2000


class Normal(Section):
    mean: float
    sd: float = Field(ge=0)


class LogNormal(Section):
    """By its median or its mean, and `sigma`, the standard deviation of the logarithm."""

    median: float | None = Field(None, gt=0)
    mean: float | None = Field(None, gt=0)
    sigma: float = Field(gt=0)

    @model_validator(mode="after")
    def _one_centre(self) -> "LogNormal":
        if (self.median is None) == (self.mean is None):
            raise ValueError("give either `median` or `mean`, not both")
        return self

    @property
    def mu(self) -> float:
        if self.median is not None:
            return math.log(self.median)
        assert self.mean is not None
        return math.log(self.mean) - self.sigma**2 / 2


class MixturePart(Section):
    """`share` of the draws come from `of`."""

    share: float = Field(gt=0)
    of: "Quantity"


class Distribution(Section):
    """Exactly one kind; `min` and `max` clip it."""

    normal: Normal | None = None
    lognormal: LogNormal | None = None
    exponential: float | None = Field(None, gt=0, description="the mean")
    geometric: float | None = Field(None, ge=1, description="the mean of a number of trials, at least 1")
    uniform: tuple[float, float] | None = None
    quantiles: list[tuple[float, float]] | None = Field(
        None, min_length=2, description="pairs of probability and value, linear between them"
    )
    values: list[float] | None = Field(None, min_length=1, description="measured values, all equally likely")
    mixture: list[MixturePart] | None = Field(None, min_length=1)
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "Distribution":
        if sum(getattr(self, kind) is not None for kind in _KINDS) != 1:
            raise ValueError(f"give exactly one of {', '.join(_KINDS)}")
        if self.quantiles and sorted(self.quantiles) != self.quantiles:
            raise Conflict("quantiles must grow", "quantiles")
        return self


_KINDS = ("normal", "lognormal", "exponential", "geometric", "uniform", "quantiles", "values", "mixture")
Quantity = Annotated[float | Distribution, Field(description="a number, or a distribution")]
MixturePart.model_rebuild()
Distribution.model_rebuild()


def draw_of(quantity: float | Distribution) -> Draw:
    """A function from a uniform number in 0..1 to a value."""
    if not isinstance(quantity, Distribution):
        value = float(quantity)
        return lambda u: value
    unclipped = _unclipped(quantity)
    if quantity.min is None and quantity.max is None:
        return unclipped
    low = -math.inf if quantity.min is None else quantity.min
    high = math.inf if quantity.max is None else quantity.max
    return lambda u: min(high, max(low, unclipped(u)))


def _unclipped(distribution: Distribution) -> Draw:
    normal = _STANDARD.inv_cdf
    if distribution.normal is not None:
        mean, sd = distribution.normal.mean, distribution.normal.sd
        return lambda u: mean + sd * normal(min(1 - _EDGE, max(_EDGE, u)))
    if distribution.lognormal is not None:
        mu, sigma = distribution.lognormal.mu, distribution.lognormal.sigma
        return lambda u: math.exp(mu + sigma * normal(min(1 - _EDGE, max(_EDGE, u))))
    if distribution.exponential is not None:
        scale = distribution.exponential
        return lambda u: -scale * math.log(max(_EDGE, 1 - u))
    if distribution.geometric is not None:
        if distribution.geometric == 1:
            return lambda u: 1.0
        step = math.log(1 - 1 / distribution.geometric)
        return lambda u: 1.0 + math.floor(math.log(max(_EDGE, 1 - u)) / step)
    if distribution.uniform is not None:
        low, high = distribution.uniform
        return lambda u: low + (high - low) * u
    if distribution.values is not None:
        ordered = sorted(distribution.values)
        return lambda u: ordered[min(len(ordered) - 1, int(u * len(ordered)))]
    if distribution.quantiles is not None:
        return _between(distribution.quantiles)
    assert distribution.mixture is not None
    return _mixed(distribution.mixture)


def _between(quantiles: list[tuple[float, float]]) -> Draw:
    at, values = [p for p, _ in quantiles], [value for _, value in quantiles]

    def draw(u: float) -> float:
        above = min(len(at) - 1, max(1, bisect_left(at, u)))
        width = at[above] - at[above - 1]
        part = min(1.0, max(0.0, (u - at[above - 1]) / width)) if width > 0 else 1.0
        return values[above - 1] + (values[above] - values[above - 1]) * part

    return draw


def _mixed(parts: list[MixturePart]) -> Draw:
    total = sum(part.share for part in parts)
    draws = [draw_of(part.of) for part in parts]
    ends = list(accumulate(part.share / total for part in parts))

    def draw(u: float) -> float:
        index = min(len(ends) - 1, bisect_left(ends, u))
        low = ends[index - 1] if index else 0.0
        return draws[index]((u - low) / (ends[index] - low))

    return draw


def mean_of(quantity: float | Distribution) -> float:
    """From the middles of many equal slices."""
    draw = draw_of(quantity)
    return sum(draw((n + 0.5) / _POINTS) for n in range(_POINTS)) / _POINTS
