"""Pictures of fits against data, of plans by price and time, and of published figures. No display is needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rollart.simulator.calibration import Calibration
from rollart.simulator.distributions import Distribution, draw_of
from rollart.simulator.fit import EngineFit
from rollart.simulator.measurements import MeasuredStep
from rollart.simulator.paper import CLOSE, PaperRow
from rollart.simulator.planner import PlanSearch
from rollart.simulator.scenario import TrainPace

_DATA, _FIT, _INK, _FAINT = "#56B4E9", "#D55E00", "#222222", "#8a8a8a"
_UNITS = {"turns": "turns", "prompt": "tokens", "observation": "tokens", "response": "tokens"}
_NAMES = {"prompt": "first observation", "delay": "around a generation"}
_MAX_DOTS = 2000


def fits(calibration: Calibration, path: Path) -> None:
    """A row per task with all fitted distribution functions; below them, engines and training."""
    rows = [(task, calibration.fits(task)) for task in calibration.measurements.tasks]
    across = max(max(len(panels) for _, panels in rows), len(calibration.engines) + 1)
    figure = Figure(figsize=(2.5 * across, 2.3 * (len(rows) + 1)), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(len(rows) + 1, across, squeeze=False)
    for each in axes.flat:
        each.set_visible(False)
    for row, (task, panels) in zip(axes, rows, strict=False):
        for panel, (key, (data, fitted)) in zip(row, panels.items(), strict=False):
            _panel(panel, f"{task}: {_NAMES.get(key, key)}", _UNITS.get(key, "seconds"))
            _cumulative(panel, data, fitted)
    last = axes[-1]
    for panel, (pool, engine) in zip(last, calibration.engines.items(), strict=False):
        _panel(panel, f"{pool}: generations, seconds", "fitted")
        _engine(panel, engine)
    train = calibration.scenario.simulate.train
    assert train is not None
    _panel(last[len(calibration.engines)], "training steps, seconds", "tokens in the batch")
    _training(last[len(calibration.engines)], calibration.measurements.trainings, train)
    figure.suptitle(f"{calibration.scenario.name}: measured (blue) and fitted (red)", x=0.01, ha="left", color=_INK)
    figure.savefig(path, dpi=110)


def plans(search: PlanSearch, path: Path) -> None:
    """Price against time of all simulated plans, and their Pareto front."""
    figure = Figure(figsize=(8, 5), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    _panel(axes, "Simulated plans", "price of all devices per hour, one H20 is 1")
    axes.set_ylabel("seconds per step", fontsize=7.5, color=_FAINT)
    front = search.front
    axes.plot([each.price for each in search.tried], [each.step_s for each in search.tried], "o", color=_DATA, ms=5)
    prices, times = [each.price for each in front], [each.step_s for each in front]
    axes.step([*prices, search.budget], [*times, times[-1]], where="post", color=_FIT, linewidth=1.2)
    axes.plot(prices, times, "o", color=_FIT, ms=6)
    if (given := search.given) is not None:
        axes.plot(given.price, given.step_s, "s", color="white", mec=_INK, mew=1.5, ms=9, zorder=3)
        axes.annotate(
            "as given", (given.price, given.step_s), (8, 6), textcoords="offset points", fontsize=8, color=_INK
        )
    for each in front:
        label = each.plan.split.replace(" generate", "").replace(" train, ", " | ")
        axes.annotate(label, (each.price, each.step_s), (6, -10), textcoords="offset points", fontsize=6.5, color=_FIT)
    axes.axvline(search.budget, color=_FAINT, linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=130)


def figures(rows: Sequence[PaperRow], path: Path) -> None:
    """Published against simulated values, and the band in which they count as close."""
    figure = Figure(figsize=(7, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    low = min(min(row.published, row.simulated) for row in rows if row.simulated > 0) / 2
    ends = np.array([low, max(max(row.published, row.simulated) for row in rows) * 2])
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.fill_between(ends, (1 - CLOSE) * ends, (1 + CLOSE) * ends, color="grey", alpha=0.2)
    for name in dict.fromkeys(row.figure for row in rows):
        of = [row for row in rows if row.figure == name and row.simulated > 0]
        axes.scatter([row.published for row in of], [row.simulated for row in of], label=name, s=18)
    axes.set(xscale="log", yscale="log", xlabel="published", ylabel="simulated", title=f"The band is {CLOSE:.0%}")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _panel(axes: Any, title: str, below: str) -> None:
    axes.set_visible(True)
    axes.set_title(title, loc="left", fontsize=9, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_FAINT, labelsize=7.5)
    axes.set_xlabel(below, fontsize=7.5, color=_FAINT)


def _cumulative(axes: Any, data: Sequence[float], fitted: float | Distribution) -> None:
    at = np.linspace(0, 1, 401)
    draw = draw_of(fitted)
    axes.step(np.quantile(data, at), at, color=_DATA, linewidth=3, where="post")
    axes.plot([draw(float(p)) for p in at], at, color=_FIT, linewidth=1.2)
    axes.set_ylim(0, 1.02)


def _engine(axes: Any, engine: EngineFit) -> None:
    stride = max(1, len(engine.seconds) // _MAX_DOTS)
    axes.plot(engine.expected[::stride], engine.seconds[::stride], ".", color=_DATA, markersize=2)
    end = max(engine.expected, default=0.0)
    axes.plot([0, end], [0, end], color=_FIT, linewidth=1.2)
    axes.set_ylabel("measured", fontsize=7.5, color=_FAINT)


def _training(axes: Any, trainings: Sequence[MeasuredStep], pace: TrainPace) -> None:
    tokens = [step.tokens for step in trainings]
    axes.plot(tokens, [step.ended - step.began for step in trainings], "o", color=_DATA, markersize=4)
    ends = [0, max(tokens)]
    axes.plot(ends, [pace.fixed + pace.token * end for end in ends], color=_FIT, linewidth=1.2)
    axes.set_ylim(bottom=0)
