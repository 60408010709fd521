"""The results of a simulation, as text and as one JSON object."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from rollart.simulator.result import PARTS, STAGES, SimulationResult, interval, prediction_interval

_NUMBERS = {
    "step_s": "step",
    "wait_s": "  waiting for the batch",
    "train_s": "  training",
    "blocked_s": "  waiting for weights",
    "tokens_per_s": "trained tokens/s",
    "answers_per_s": "generated tokens/s",
    "mfu": "model FLOPs utilization",
    "trajectories_per_s": "trajectories/s",
    "seconds": "time to the last step",
    "cost_per_step": "cost per step",
}


def _values(results: Sequence[SimulationResult]) -> dict[str, list[float]]:
    found = {key: [getattr(result, key) for result in results] for key in _NUMBERS}
    found["seconds"] = [result.step_times[-1] if result.step_times else math.nan for result in results]
    return found


def _numbers(results: Sequence[SimulationResult]) -> dict[str, tuple[float, float]]:
    """Mean and half of the 95% interval, by key."""
    return {key: interval(values) for key, values in _values(results).items()}


def _ranges(results: Sequence[SimulationResult], drawn: Sequence[SimulationResult]) -> dict[str, tuple[float, float]]:
    """Where the real number is with 95%, by key, as far as seeds and the uncertain constants decide it."""
    if not drawn:
        return {}
    return {key: prediction_interval(values) for key, values in _values([*results, *drawn]).items()}


def summary(results: Sequence[SimulationResult], drawn: Sequence[SimulationResult] = ()) -> dict[str, Any]:
    """Means over the seeds; `interval` is half of the 95% interval of each, `runs` the full result of each seed.
    `range` is the 95% interval of the prediction, over `drawn` too: simulations with other seeds and constants."""
    first, numbers = results[0], _numbers(results)
    return {
        "name": first.name,
        "preset": first.preset,
        "alpha": first.alpha,
        "steps": first.steps,
        "seeds": [result.seed for result in results],
        **{key: mean for key, (mean, _) in numbers.items()},
        "interval": {key: None if math.isnan(half) else half for key, (_, half) in numbers.items()},
        "range": _ranges(results, drawn),
        "price_per_hour": first.price_per_hour,
        "runs": [asdict(result) for result in results],
    }


def report(results: Sequence[SimulationResult], drawn: Sequence[SimulationResult] = ()) -> RenderableType:
    first = results[0]
    seeds = f"seed {first.seed}" if len(results) == 1 else f"{len(results)} seeds"
    head = f" ({first.preset}, alpha {first.alpha}, {seeds}): {first.counted} simulated steps after the warmup"
    shares, stages = [result.exposed for result in results], [result.trajectory for result in results]
    parts: list[RenderableType] = [Text.assemble((first.name, "bold"), head), _overview(results, drawn), Text()]
    parts += [_heading("What a step is made of"), _means(PARTS, shares, "{:.1%}"), Text()]
    parts += [_heading("Where the time of a trajectory goes, seconds"), _means(STAGES, stages, "{:.1f}"), Text()]
    parts += [_heading("Devices"), _pools(results), Text(), _rest(results)]
    return Group(*parts)


def _heading(text: str) -> Text:
    return Text(text, style="bold")


def _table(first: str, *others: str) -> Table:
    columns = (Column(name, justify="right") for name in others)
    return Table(first, *columns, box=None, pad_edge=False, header_style="dim")


def _overview(results: Sequence[SimulationResult], drawn: Sequence[SimulationResult]) -> Table:
    ranges = _ranges(results, drawn)
    table = _table("", "", *(["+-"] if len(results) > 1 else []), *(["95% of predictions"] if ranges else []))
    for key, (number, half) in _numbers(results).items():
        unit = " s" if (key.endswith("_s") and "per" not in key) or key == "seconds" else ""
        cells = [f"{number:,.4g}{unit}"] + ([] if math.isnan(half) else [f"{half:,.2g}"])
        if key in ranges:
            low, high = ranges[key]
            cells.append("" if low == high else f"{low:,.3g} to {high:,.3g}")
        table.add_row(_NUMBERS[key], *cells)
    return table


def _means(names: Sequence[str], by_seed: Sequence[dict[str, float]], style: str) -> Table:
    table = _table(*names)
    table.add_row(*(style.format(fmean(values.get(name, 0.0) for values in by_seed)) for name in names))
    return table


def _pools(results: Sequence[SimulationResult]) -> Table:
    table = _table("pool", "devices", "prefill", "decode", "weights", "idle, waiting for")
    for name, pool in results[0].pools.items():
        causes = sorted(pool.idle.items(), key=lambda item: -item[1])
        uses = [result.pools[name] for result in results]
        shares = (f"{fmean(getattr(use, kind) for use in uses):.1%}" for kind in ("prefill", "decode", "weights"))
        idle = ", ".join(f"{cause} {share:.0%}" for cause, share in causes if share >= 0.005)
        table.add_row(name, f"{pool.devices} {pool.device}", *shares, idle)
    return table


def _rest(results: Sequence[SimulationResult]) -> Text:
    first = results[0]
    ages = ", ".join(f"{share:.1%} of age {age}" for age, share in first.staleness.items())
    drops = ", ".join(
        f"{count} {name}" for name, count in first.outcomes.items() if name not in ("finished", "truncated")
    )
    groups = ", ".join(f"{count} {reason}" for reason, count in first.drops.items())
    used = {
        "trainer": fmean(result.trainer_use for result in results),
        "environments": fmean(result.environments_use for result in results),
        "rewards": fmean(result.reward_use for result in results),
    }
    idle = fmean(result.trainer_idle for result in results)
    lines = [
        f"busy      {', '.join(f'{name} {share:.1%}' for name, share in used.items())}",
        f"idle      trainer {idle:.1%}, waiting for batches",
        f"trained   {ages or 'nothing'}; allowed: {first.alpha}",
        f"mixture   {_mixture(first)}",
        f"dropped   {drops or 'no trajectory'}; groups: {groups or 'none'}",
        f"price     {first.price_per_hour:.4g} per hour, one H20 is 1",
    ]
    return Text("\n".join(lines))


def _mixture(result: SimulationResult) -> str:
    """Groups are whole, so a share is exact if it is less than one group off."""
    off = max((abs(share.trained - share.asked) for share in result.mixture.values()), default=0.0)
    tasks = ", ".join(f"{task} {share.trained:,} of {share.asked:,.1f}" for task, share in result.mixture.items())
    return f"{'exact' if off < 1 else f'up to {off:,.1f} groups off'}; groups trained and asked for: {tasks}"
