"""A sweep: the same scenario with other values of some keys, one point for each."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from rich.table import Table

from rollart.core.errors import ConfigError
from rollart.simulator.report import summary
from rollart.simulator.result import SimulationResult, interval


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """`values` by key, as they were written."""

    values: dict[str, str]

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items() if key != "preset"]

    @property
    def preset(self) -> str | None:
        return self.values.get("preset")


def points(sweeps: Sequence[str]) -> list[SweepPoint]:
    """All combinations of `KEY=A,B,C` and `KEY,KEY=A:B,C:D`, whose keys change together. Raises ConfigError."""
    axes = [list(_axis(text)) for text in sweeps]
    found = [SweepPoint({key: value for part in parts for key, value in part.items()}) for parts in product(*axes)]
    if len({key for point in found for key in point.values}) < sum(len(axis[0]) for axis in axes):
        raise ConfigError("--sweep: a key may be swept only once")
    return found


def _axis(text: str) -> Iterator[dict[str, str]]:
    names, equals, values = text.partition("=")
    keys = [name.strip() for name in names.split(",")]
    if not equals or not all(keys) or not values.strip():
        raise ConfigError(f"--sweep {text}: write it as KEY=A,B,C, or as KEY,KEY=A:B,C:D to change several together")
    for value in _split(values, ","):
        parts = _split(value, ":") if len(keys) > 1 else [value]
        if len(parts) != len(keys):
            raise ConfigError(
                f"--sweep {text}: {value.strip()!r} should have a value for each of {', '.join(keys)}, with `:` between"
            )
        yield dict(zip(keys, map(str.strip, parts), strict=True))


def _split(text: str, mark: str) -> list[str]:
    """At every `mark` outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


LEGEND = "trainer, engines, rewards: share of time at work; unused: trajectories that were not trained"
Swept = Sequence[tuple[SweepPoint, Sequence[SimulationResult]]]


def table(swept: Swept) -> Table:
    """A row per point, without empty columns."""
    rows = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    cells = [_cells(results) for _, results in swept]
    columns = [name for name in cells[0] if any(row[name].strip("0.%") for row in cells)]
    for key in swept[0][0].values:
        name = ".".join(key.split(".")[-2:])
        rows.add_column(name, overflow="fold", min_width=len(name))
    for column in columns:
        rows.add_column(column, justify="right", no_wrap=True)
    for (point, _), row in zip(swept, cells, strict=True):
        rows.add_row(*point.values.values(), *(row[name] for name in columns))
    return rows


def _cells(results: Sequence[SimulationResult]) -> dict[str, str]:
    step, half = interval([result.step_s for result in results])
    return {
        "s/step": f"{step:,.4g}",
        "+-": "" if math.isnan(half) else f"{half:.2g}",
        "tokens/s": f"{fmean(result.tokens_per_s for result in results):,.0f}",
        "trainer": f"{fmean(result.trainer_use for result in results):.0%}",
        "engines": f"{fmean(map(_busy, results)):.0%}",
        "rewards": f"{fmean(result.reward_use for result in results):.1%}",
        "unused": f"{fmean(map(_unused, results)):.1%}",
        "price/h": f"{results[0].price_per_hour:.4g}",
        "price/step": f"{fmean(result.cost_per_step for result in results):.4g}",
    }


def as_rows(swept: Swept) -> list[dict[str, Any]]:
    return [{"values": point.values, **summary(results)} for point, results in swept]


def _busy(result: SimulationResult) -> float:
    """Mean over all generating devices."""
    devices = sum(pool.devices for pool in result.pools.values())
    return sum(pool.busy * pool.devices for pool in result.pools.values()) / max(1, devices)


def _unused(result: SimulationResult) -> float:
    ended = sum(result.outcomes.values())
    return 1.0 - sum(result.outcomes.get(name, 0) for name in ("finished", "truncated")) / max(1, ended)
