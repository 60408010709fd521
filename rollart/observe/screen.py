"""The live screen as a pure function of a snapshot. Lines are laid out by hand: tables cost ten times the CPU."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from rollart.observe.draw import bar, clock, colour, count, fill, fit, label, number, percent, sparkline, stacked
from rollart.observe.metric_table import metrics_of
from rollart.observe.snapshot import Snapshot, TaskSnapshot, words_of

MAX_WIDTH = 120
_PIPELINE = {"running": "cyan", "scoring": "yellow", "ready": "green", "training": "magenta"}
_LABEL = 11
_WARNING_LINES = 4


def screen(shot: Snapshot, weights: Mapping[str, float], width: int) -> RenderableType:
    """Never wider than `width`; made for 80 columns and more."""
    width = min(width, MAX_WIDTH)
    inner = width - 4
    lines = [_progress(shot, inner), Text(), *_tasks(shot, weights, inner)]
    if shot.history or shot.phase == "training":
        lines += [Text(), *_machinery(shot, inner)]
    if shot.emulated:
        lines.append(_line(Text(f"EMULATED devices: {', '.join(shot.emulated)}", style="bold yellow"), inner))
    lines += [line for message in shot.warnings[-2:] for line in _warning(message, inner)]
    about = f" · {shot.preset} · alpha {shot.alpha} · seed {shot.seed}"
    title = Text.assemble((shot.name or "rollart", "bold default"), (about, "default"))
    title.truncate(inner - 4, overflow="ellipsis")
    return Panel(Group(*lines), title=title, title_align="left", border_style="bright_black", width=width)


def _line(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def _warning(message: str, width: int) -> Iterator[Text]:
    wrapped = textwrap.wrap(f"! {message}", width, max_lines=_WARNING_LINES, placeholder="…", subsequent_indent="  ")
    return (_line(Text(line, style="yellow"), width) for line in wrapped)


def _progress(shot: Snapshot, width: int) -> Text:
    if shot.phase == "warming up" and shot.warmup:
        step, steps, loss = shot.warmup
        text, share, style = (
            f" warmup {step}/{steps} · loss {loss:.3f} · {clock(shot.t)}",
            step / max(1, steps),
            "yellow",
        )
    else:
        eta = f" · ETA {clock(shot.eta_s)}" if shot.eta_s is not None and shot.phase == "training" else ""
        played = f" {shot.played} episodes" if shot.phase == "evaluating" else ""
        text = f" {shot.phase}{played} · step {shot.step}/{shot.steps} · {clock(shot.t)}{eta}"
        share, style = shot.step / max(1, shot.steps), "green"
    drawn = bar(share, max(8, width - len(text)), style)
    return _line(drawn.append(text, style="bold"), width)


def _tasks(shot: Snapshot, weights: Mapping[str, float], width: int) -> list[Text]:
    name = min(max([len(task.name) for task in shot.tasks] + [4]), max(8, width - 62))
    most = max((len(task.held_out) for task in shot.tasks), default=0)
    spark = max(6, min(most, width - name - 53))
    total = sum(weights.get(task.name, 1.0) for task in shot.tasks) or 1.0
    columns = f"{'reward':>7} {'turns':>6} {'tokens':>7} {'time':>7}"
    head = f"{'task':<{name}} {'share':>5}  {'held-out success':<{spark + 14}} {columns}"
    lines = [_line(Text(head, style="dim"), width)]
    for index, task in enumerate(shot.tasks):
        share = percent(weights.get(task.name, 1.0) / total)
        line = Text.assemble((fit(task.name, name), f"bold {colour(index)}"), f" {share:>5}  ")
        lines.append(_line(line.append(_success(task, spark, colour(index))).append(_means(task)), width))
    return lines


def _success(task: TaskSnapshot, spark: int, style: str) -> Text:
    points = [point.success for point in task.held_out]
    text = Text().append(f"{sparkline(points, spark):<{spark}} ", style=style)
    if not task.before or not task.now:
        return text.append("-".ljust(13), style="dim")
    text.append(f"{task.before.success:.2f}", style="dim")
    if len(points) == 1:
        return text.append(" " * 9)
    better = task.now.success > task.before.success
    text.append(" → ", style="dim")
    return text.append(f"{task.now.success:.2f}", style="bold green" if better else "bold red").append("  ")


def _means(task: TaskSnapshot) -> str:
    seconds = "-" if task.seconds is None else f"{task.seconds:.1f} s"
    return f" {number(task.reward):>7} {number(task.turns, 1):>6} {number(task.tokens, 0):>7} {seconds:>7}"


def _machinery(shot: Snapshot, width: int) -> list[Text]:
    return [
        _line(_pipeline(shot, width), width),
        _line(_use(shot, width), width),
        _line(_ages(shot), width),
        *(_line(text, width) for text in _speed(shot, width)),
        _line(_drops(shot), width),
    ]


def _pipeline(shot: Snapshot, width: int) -> Text:
    parts: dict[str, int] = asdict(shot.pipeline)
    text = label("pipeline", _LABEL)
    text.append(stacked(parts, _PIPELINE, max(8, width - _LABEL - 54)))
    for index, (name, value) in enumerate(parts.items()):
        text.append(f" {fill(index)}{name} ", style=_PIPELINE[name]).append(f"{value:<3}")
    return text


def _use(shot: Snapshot, width: int) -> Text:
    text = label("busy", _LABEL)
    each = max(4, (width - _LABEL - 46) // 3)
    for name, share in (
        *([("engine", shot.recent_use.engine)] if words_of(shot.work).tokens else []),
        ("trainer", shot.recent_use.trainer),
        ("environments", shot.recent_use.environments),
    ):
        text.append(f"{name} ").append(bar(share, each, "cyan")).append(f" {percent(share):<5}")
    return text


def _ages(shot: Snapshot) -> Text:
    text = label("staleness", _LABEL)
    for age, trained in shot.staleness.items():
        text.append(f"{age}: ", style="dim").append(f"{percent(trained / max(1, shot.trained))}  ")
    return text.append(f"of {count(shot.trained)} trained (bound {shot.alpha})", style="dim")


def _speed(shot: Snapshot, width: int) -> Iterator[Text]:
    """The metrics of the table, in as many lines as they need."""
    text = label("speed", _LABEL)
    for metric in metrics_of(shot.work):
        if shown := metric.text(shot.metrics):
            if len(text) > _LABEL and len(text) + len(shown) + 2 > width:
                yield text
                text = label("", _LABEL)
            gap = "  " if len(text) > _LABEL else ""
            text.append(gap + shown, style="dim" if metric.bar else "")
    yield text


def _drops(shot: Snapshot) -> Text:
    drops = "  ".join(f"{reason} {number}" for reason, number in shot.drops.items())
    return label("dropped", _LABEL).append(drops or "none", style="" if drops else "dim")
