"""The learning curves as one picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from rollart.observe.snapshot import Snapshot, TaskSnapshot, words_of

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK, _FAINT = "#222222", "#8a8a8a"


def write(shot: Snapshot, path: Path) -> None:
    """Held-out success per task above; reward, staleness and speed below. Draws without a display."""
    figure = Figure(figsize=(10, 7.2), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(2, 1, height_ratios=[1.6, 1])
    above, below = halves
    colours = {task.name: _COLOURS[index % len(_COLOURS)] for index, task in enumerate(shot.tasks)}
    _success(above.subplots(), shot, colours)
    reward, staleness, speed = below.subplots(1, 3)
    _reward(reward, shot, colours)
    _staleness(staleness, shot)
    _speed(speed, shot)
    title = f"{shot.name}   {shot.preset}, alpha {shot.alpha}, seed {shot.seed}, {shot.step} steps"
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, color=_INK)
    figure.savefig(path, dpi=130)


def _panel(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_FAINT, labelsize=8.5)
    axes.grid(axis="y", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step", fontsize=8.5, color=_FAINT)


def _success(axes: Any, shot: Snapshot, colours: dict[str, str]) -> None:
    _panel(axes, f"Success on {words_of(shot.work).episodes}")
    for task in shot.tasks:
        points = task.held_out
        if points:
            steps, values = [point.version for point in points], [point.success for point in points]
            axes.plot(steps, values, color=colours[task.name], linewidth=2, marker="o", markersize=3.5)
            for point in (point for point in points if point.final):
                axes.plot(point.version, point.success, "o", color="white", mec=colours[task.name], mew=2, ms=7.5)
    last = max([point.version for task in shot.tasks for point in task.held_out] + [1])
    axes.set_xlim(-0.02 * last, last * 1.02)
    axes.set_ylim(-0.02, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    shown = [task for task in shot.tasks if task.now]
    for task, height in zip(shown, _spread([task.now.success for task in shown if task.now], 0.062), strict=True):
        axes.text(last * 1.03, height, _label(task), color=colours[task.name], fontsize=9.5, va="center")


def _label(task: TaskSnapshot) -> str:
    before, now = task.before, task.now
    if before is None or now is None or before is now:
        return task.name
    return f"{task.name}  {before.success * 100:.0f}% → {now.success * 100:.0f}%"


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Labels near their lines, at least `gap` apart and not above the top."""
    order = sorted(range(len(heights)), key=lambda index: -heights[index])
    placed = list(heights)
    ceiling = 1.02
    for index in order:
        placed[index] = min(heights[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean of a window around each point, a tenth of the series wide."""
    half = max(1, len(values) // 20)
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _reward(axes: Any, shot: Snapshot, colours: dict[str, str]) -> None:
    _panel(axes, "Training reward")
    for task in shot.tasks:
        points = [(point.version, point.rewards[task.name]) for point in shot.history if task.name in point.rewards]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, color=colours[task.name], linewidth=0.7, alpha=0.3)
            axes.plot(steps, _smooth(values), color=colours[task.name], linewidth=1.6)


def _staleness(axes: Any, shot: Snapshot) -> None:
    _panel(axes, f"Age of trained data (bound {shot.alpha})")
    steps = [point.version for point in shot.history]
    axes.fill_between(
        steps, [point.mean_staleness for point in shot.history], color=_COLOURS[5], alpha=0.35, linewidth=0
    )
    axes.plot(steps, [max(point.staleness, default=0) for point in shot.history], color=_FAINT, linewidth=1)
    axes.axhline(shot.alpha, color=_COLOURS[1], linewidth=1, linestyle="--")
    axes.set_ylim(0, max([1, shot.alpha, *shot.staleness]) * 1.15)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _speed(axes: Any, shot: Snapshot) -> None:
    _panel(axes, "Generated tokens per second")
    steps = [point.version for point in shot.history]
    values = [point.metrics["tokens_per_s"] for point in shot.history]
    axes.plot(steps, values, color=_COLOURS[2], linewidth=0.7, alpha=0.3)
    axes.plot(steps, _smooth(values), color=_COLOURS[2], linewidth=1.6)
    axes.set_ylim(bottom=0)
