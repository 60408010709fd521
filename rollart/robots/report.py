"""Curves of a run, and the table and bars of a comparison."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from rollart.core.event_log import read_events
from rollart.core.events import Evaluated, StepDone, WarmupStep
from rollart.core.run_folder import events_of
from rollart.observe.draw import sparkline, table
from rollart.observe.report import wilson
from rollart.robots.comparison import ComparedPolicy
from rollart.robots.episodes import RobotScore
from rollart.robots.suites import group_of
from rollart.simulator.result import interval

_INK, _FAINT = "#222222", "#8a8a8a"
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#8a8a8a")


def write_curves(folder: Path) -> None:
    """Loss of an imitation, or success while a policy is tuned, and held-out success, as `curves.png` in the run
    folder."""
    log = events_of(folder)
    losses = {event.step: event.loss for event in read_events(log, WarmupStep)}
    played = {event.version: event.values["reward"] for event in read_events(log, StepDone)}
    scores = {event.version: event for event in read_events(log, Evaluated)}
    figure = Figure(figsize=(9, 3.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps_are = "update" if played else "optimizer step"
    _axes(left, "Success of the episodes it learns from" if played else "Imitation loss", steps_are)
    left.plot(list(played or losses), list((played or losses).values()), color="#0072B2", linewidth=1.6)
    left.set_ylim(bottom=0)
    _axes(right, "Success on held-out episodes, 95% interval", steps_are)
    steps, points = list(scores), list(scores.values())
    middle = [point.success for point in points]
    ends = [wilson(point.success, point.episodes) for point in points]
    errors = [[max(0.0, share - low) for share, (low, _) in zip(middle, ends, strict=True)],
              [max(0.0, high - share) for share, (_, high) in zip(middle, ends, strict=True)]]  # fmt: skip
    right.errorbar(steps, middle, yerr=errors, color="#009E73", marker="o", markersize=4, capsize=3, linewidth=1.6)
    right.set_ylim(-0.02, 1.04)
    figure.suptitle(folder.name, x=0.01, ha="left", fontsize=12, color=_INK)
    figure.savefig(folder / "curves.png", dpi=130)


def _axes(axes: Any, title: str, steps_are: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_FAINT)
    axes.tick_params(colors=_FAINT, labelsize=8.5)
    axes.grid(axis="y", color="#ececec", linewidth=0.8)
    axes.set_xlabel(steps_are, fontsize=8.5, color=_FAINT)


def score_table(scores: Sequence[tuple[str, Path, RobotScore]]) -> Table:
    """By task: the curve of held-out success, the last one with its 95% interval, and the milliseconds of a chunk
    (median, 99th percentile). The scores come with their run folders. Fits 80 columns."""
    rows = table("task", "curve", "success", "95% interval", "played", "ms, p99")
    for task, folder, score in scores:
        low, high = wilson(score.success, len(score.played))
        curve = [event.success for event in read_events(events_of(folder), Evaluated)]
        rows.add_row(
            task,
            sparkline(curve, len(curve)),
            f"{score.success:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{len(score.played)} of {len(score.episodes)}",
            ", ".join(f"{number:.2f}" for number in score.latency_ms),
        )
    return rows


def comparison_table(results: Sequence[ComparedPolicy]) -> Table:
    """Success by task and policy, then by group of tasks: the mean over seeds, and half of its 95% interval. Last, over
    all tasks, or over the pairs of task and seed that every policy has, if the comparison is not complete."""
    policies = list(dict.fromkeys(one.policy for one in results))
    found = {policy: [one for one in results if one.policy == policy] for policy in policies}
    rows = table("task", *policies)
    for number, column in enumerate(rows.columns):
        column.no_wrap = not number  # six policies fit 80 columns, if their long names are folded
    for task in dict.fromkeys(one.task for one in results):
        same = [[one for one in some if one.task == task] for some in found.values()]
        rows.add_row(task.removeprefix("metaworld:"), *(_mean([one.success for one in some]) for some in same))
    rows.add_section()
    for group, means in grouped(results).items():
        rows.add_row(group, *(_mean(means[policy]) for policy in policies))
    rows.add_section()
    for quantile in ("p50_ms", "p99_ms"):
        times = (median(getattr(one, quantile) for one in some) for some in found.values())
        rows.add_row(f"ms a chunk, {quantile[:3]}", *(f"{value:.2f}" for value in times))
    rows.add_row("ms a train step", *(f"{fmean(one.step_ms for one in some):.2f}" for some in found.values()))
    return rows


def grouped(results: Sequence[ComparedPolicy]) -> dict[str, dict[str, list[float]]]:
    """For each group of tasks, then over all, the mean success of each policy over the tasks, for each seed."""
    common = in_common(results)
    policies = list(dict.fromkeys(one.policy for one in results))
    groups: dict[str, list[ComparedPolicy]] = defaultdict(list)
    for one in common:
        groups[group_of(one.task)].append(one)
    shown = {group: _same_tasks(some) for group, some in groups.items()} if len(groups) > 1 else {}
    every = _same_tasks(common)
    name = "all tasks" if len(every) == len(results) else f"all, {len(every) // len(policies)} each"
    groups = {**shown, name: every}
    return {group: {policy: seed_means(some, policy) for policy in policies} for group, some in groups.items()}


def _same_tasks(results: Sequence[ComparedPolicy]) -> list[ComparedPolicy]:
    """Those of the seeds that have the most tasks: the others would be means of something else."""
    tasks: dict[int, set[str]] = defaultdict(set)
    for one in results:
        tasks[one.seed].add(one.task)
    most = max(tasks.values(), key=len, default=set())
    return [one for one in results if tasks[one.seed] == most]


def write_bars(results: Sequence[ComparedPolicy], path: Path) -> None:
    """Success by group of tasks and policy, with 95% intervals."""
    groups = grouped(results)
    figure = Figure(figsize=(9, 3.6), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    policies = list(dict.fromkeys(one.policy for one in results))
    width = 0.84 / len(policies)
    for number, policy in enumerate(policies):
        ends = [interval(means[policy]) if means[policy] else (0.0, 0.0) for means in groups.values()]
        places = [place + (number - (len(policies) - 1) / 2) * width for place in range(len(groups))]
        halves = [0.0 if half != half else half for _, half in ends]  # NaN for a single seed
        bars = [middle for middle, _ in ends]
        color = _COLORS[number % len(_COLORS)]
        axes.bar(
            places,
            bars,
            0.9 * width,
            yerr=halves,
            color=color,
            label=policy,
            error_kw={"ecolor": _INK, "elinewidth": 1, "capsize": 2},
            zorder=2,
        )
    axes.set_xticks(range(len(groups)), list(groups))
    _axes(axes, "Success on held-out episodes, mean over seeds and its 95% interval", "")
    axes.tick_params(axis="x", colors=_INK)
    axes.set_ylim(0, 1.04)
    figure.legend(loc="outside lower center", ncols=min(6, len(policies)), frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=130)


def in_common(results: Sequence[ComparedPolicy]) -> list[ComparedPolicy]:
    """The results of pairs of task and seed that every policy has: only these compare like with like."""
    done: dict[tuple[str, int], set[str]] = defaultdict(set)
    for one in results:
        done[one.task, one.seed].add(one.policy)
    count = len({one.policy for one in results})
    return [one for one in results if len(done[one.task, one.seed]) == count]


def seed_means(results: Sequence[ComparedPolicy], policy: str) -> list[float]:
    """The mean success of a policy over the tasks, for each seed."""
    shares: dict[int, list[float]] = defaultdict(list)
    for one in results:
        if one.policy == policy:
            shares[one.seed].append(one.success)
    return [fmean(values) for values in shares.values()]


def seed_differences(results: Sequence[ComparedPolicy], policy: str, other: str) -> list[float]:
    """The mean success of a policy over the tasks less that of the other, for each seed that has all tasks of both."""
    both = _same_tasks(in_common([one for one in results if one.policy in (policy, other)]))
    by_seed = ([one for one in both if one.seed == seed] for seed in sorted({one.seed for one in both}))
    return [seed_means(some, policy)[0] - seed_means(some, other)[0] for some in by_seed]


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle, half = interval(values)
    return f"{middle:.2f}" if half != half else f"{middle:.2f}±{half:.2f}".replace("±0", "±")  # NaN for a single seed
