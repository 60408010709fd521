"""Distributions of the scenario file: how long something takes, how many there are.

Every distribution is its inverse distribution function, so one uniform number makes one draw. The same trajectory has
the same luck under every schedule and on every cluster, and comparisons are between equals.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
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


class Part(Section):
    """`share` of the draws come from `of`."""

    share: float = Field(gt=0)
    of: "Spread"


class Distribution(Section):
    """Exactly one kind; `min` and `max` clip it."""

    normal: Normal | None = None
    lognormal: LogNormal | None = None
    exponential: float | None = Field(None, gt=0, description="the mean")
    geometric: float | None = Field(None, ge=1, description="the mean of a number of trials, at least 1")
    uniform: tuple[float, float] | None = None
    quantiles: list[tuple[float, float]] | None = Field(
        None, min_length=2, description="pairs of a probability and the value there, straight between them"
    )
    values: list[float] | None = Field(None, min_length=1, description="measured ones, all equally likely")
    mixture: list[Part] | None = Field(None, min_length=1)
    min: float | None = None
    max: float | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "Distribution":
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_KINDS)}")
        if self.quantiles and sorted(self.quantiles) != self.quantiles:
            raise Conflict("quantiles must grow", "quantiles")
        return self


_KINDS = ("normal", "lognormal", "exponential", "geometric", "uniform", "quantiles", "values", "mixture")
Spread = Annotated[float | Distribution, Field(description="a number, or a distribution")]
Part.model_rebuild()
Distribution.model_rebuild()


def draw_of(spread: float | Distribution) -> Draw:
    """From a uniform number in 0..1 to a value."""
    if not isinstance(spread, Distribution):
        value = float(spread)
        return lambda u: value
    inner = _inner(spread)
    if spread.min is None and spread.max is None:
        return inner
    low = -math.inf if spread.min is None else spread.min
    high = math.inf if spread.max is None else spread.max
    return lambda u: min(high, max(low, inner(u)))


def _inner(spread: Distribution) -> Draw:
    normal = _STANDARD.inv_cdf
    if spread.normal is not None:
        mean, sd = spread.normal.mean, spread.normal.sd
        return lambda u: mean + sd * normal(min(1 - _EDGE, max(_EDGE, u)))
    if spread.lognormal is not None:
        mu, sigma = spread.lognormal.mu, spread.lognormal.sigma
        return lambda u: math.exp(mu + sigma * normal(min(1 - _EDGE, max(_EDGE, u))))
    if spread.exponential is not None:
        scale = spread.exponential
        return lambda u: -scale * math.log(max(_EDGE, 1 - u))
    if spread.geometric is not None:
        if spread.geometric == 1:
            return lambda u: 1.0
        step = math.log(1 - 1 / spread.geometric)
        return lambda u: 1.0 + math.floor(math.log(max(_EDGE, 1 - u)) / step)
    if spread.uniform is not None:
        low, high = spread.uniform
        return lambda u: low + (high - low) * u
    if spread.values is not None:
        ordered = sorted(spread.values)
        return lambda u: ordered[min(len(ordered) - 1, int(u * len(ordered)))]
    if spread.quantiles is not None:
        return _between(spread.quantiles)
    assert spread.mixture is not None
    return _mixed(spread.mixture)


def _between(quantiles: list[tuple[float, float]]) -> Draw:
    at, values = [p for p, _ in quantiles], [value for _, value in quantiles]

    def draw(u: float) -> float:
        above = min(len(at) - 1, max(1, bisect_left(at, u)))
        width = at[above] - at[above - 1]
        part = min(1.0, max(0.0, (u - at[above - 1]) / width)) if width > 0 else 1.0
        return values[above - 1] + (values[above] - values[above - 1]) * part

    return draw


def _mixed(parts: list[Part]) -> Draw:
    total = sum(part.share for part in parts)
    draws = [draw_of(part.of) for part in parts]
    ends: list[float] = []
    for part in parts:
        ends.append((ends[-1] if ends else 0.0) + part.share / total)

    def draw(u: float) -> float:
        index = min(len(ends) - 1, bisect_left(ends, u))
        low = ends[index - 1] if index else 0.0
        return draws[index]((u - low) / (ends[index] - low))

    return draw


def mean_of(spread: float | Distribution) -> float:
    """By the middle of many equal slices."""
    draw = draw_of(spread)
    return sum(draw((n + 0.5) / _POINTS) for n in range(_POINTS)) / _POINTS
