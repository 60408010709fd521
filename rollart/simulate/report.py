"""The results of a simulation, as text and as one JSON object."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollart.simulate.result import PARTS, STAGES, SimulationResult, interval

Pick = Callable[[SimulationResult], float]

_NUMBERS: dict[str, tuple[str, Pick]] = {
    "step_s": ("step", lambda r: r.step_s),
    "wait_s": ("  waiting for the batch", lambda r: r.wait_s),
    "train_s": ("  training", lambda r: r.train_s),
    "blocked_s": ("  waiting for weights", lambda r: r.blocked_s),
    "tokens_per_s": ("trained tokens/s", lambda r: r.tokens_per_s),
    "answers_per_s": ("generated tokens/s", lambda r: r.answers_per_s),
    "trajectories_per_s": ("trajectories/s", lambda r: r.trajectories_per_s),
    "seconds": ("time to the last step", lambda r: r.step_times[-1] if r.step_times else math.nan),
    "cost_per_step": ("cost per step", lambda r: r.cost_per_step),
}


def summary(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """Means over the seeds; `interval` is half of the 95% interval of each, `runs` the full result of each seed."""
    numbers = {key: interval([pick(result) for result in results]) for key, (_, pick) in _NUMBERS.items()}
    first = results[0]
    return {
        "name": first.name,
        "preset": first.preset,
        "alpha": first.alpha,
        "steps": first.steps,
        "seeds": [result.seed for result in results],
        **{key: mean for key, (mean, _) in numbers.items()},
        "interval": {key: None if math.isnan(half) else half for key, (_, half) in numbers.items()},
        "price_per_hour": first.price_per_hour,
        "runs": [asdict(result) for result in results],
    }


def report(results: Sequence[SimulationResult]) -> RenderableType:
    first = results[0]
    seeds = f"seed {first.seed}" if len(results) == 1 else f"{len(results)} seeds"
    head = f" ({first.preset}, alpha {first.alpha}, {seeds}): {first.counted} simulated steps after the warmup"
    parts: list[RenderableType] = [Text.assemble((first.name, "bold"), head), _numbers(results), Text()]
    parts += [_heading("What a step is made of"), _shares(results), Text()]
    parts += [_heading("Where the time of a trajectory goes, seconds"), _seconds(results), Text()]
    parts += [_heading("Devices"), _pools(results), Text(), _rest(results)]
    return Group(*parts)


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _mean(results: Sequence[SimulationResult], pick: Pick) -> float:
    return sum(map(pick, results)) / len(results)


def _numbers(results: Sequence[SimulationResult]) -> Table:
    table = _table("", "", "+-")
    for key, (name, pick) in _NUMBERS.items():
        mean, half = interval([pick(result) for result in results])
        unit = " s" if (key.endswith("_s") and "per" not in key) or key == "seconds" else ""
        table.add_row(name, f"{mean:,.4g}{unit}", "" if math.isnan(half) else f"{half:,.2g}")
    return table


def _shares(results: Sequence[SimulationResult]) -> Table:
    table = _table(*PARTS)
    table.add_row(*(f"{_mean(results, partial(_exposed, part)):.1%}" for part in PARTS))
    return table


def _exposed(part: str, result: SimulationResult) -> float:
    return result.exposed.get(part, 0.0)


def _seconds(results: Sequence[SimulationResult]) -> Table:
    table = _table(*STAGES)
    table.add_row(*(f"{_mean(results, partial(_stage, stage)):.1f}" for stage in STAGES))
    return table


def _stage(stage: str, result: SimulationResult) -> float:
    return result.trajectory.get(stage, 0.0)


def _pools(results: Sequence[SimulationResult]) -> Table:
    table = _table("pool", "devices", "prefill", "decode", "weights", "idle, waiting for")
    for name, pool in results[0].pools.items():
        causes = sorted(pool.idle.items(), key=lambda item: -item[1])
        shares = (f"{_mean(results, partial(_use, name, kind)):.1%}" for kind in ("prefill", "decode", "weights"))
        idle = ", ".join(f"{cause} {share:.0%}" for cause, share in causes if share >= 0.005)
        table.add_row(name, f"{pool.devices} {pool.device}", *shares, idle)
    return table


def _use(pool: str, kind: str, result: SimulationResult) -> float:
    return float(getattr(result.pools[pool], kind))


def _rest(results: Sequence[SimulationResult]) -> Text:
    first = results[0]
    ages = ", ".join(f"{share:.1%} of age {age}" for age, share in first.staleness.items())
    drops = ", ".join(
        f"{count} {name}" for name, count in first.outcomes.items() if name not in ("finished", "truncated")
    )
    groups = ", ".join(f"{count} {reason}" for reason, count in first.drops.items())
    used = {
        "trainer": _mean(results, lambda r: r.trainer_use),
        "environments": _mean(results, lambda r: r.environments_use),
        "rewards": _mean(results, lambda r: r.reward_use),
    }
    lines = [
        f"busy      {', '.join(f'{name} {share:.1%}' for name, share in used.items())}",
        f"trained   {ages or 'nothing'}",
        f"dropped   {drops or 'no trajectory'}; groups: {groups or 'none'}",
        f"price     {first.price_per_hour:.4g} per hour, one H20 is 1",
    ]
    return Text("\n".join(lines))
