"""Small drawings in text: bars, sparklines, tables, times and numbers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

_LEVELS = "▁▂▃▄▅▆▇█"
_FILLS = "━░═▒┅▓▪"  # of the parts of a bar, which must differ without colour too
_TEXT_COLUMNS = {"task", "trajectory", "role", "name", "reason", "outcome", "about", "device", "mostly"}
_TEXT_COLUMNS |= {"by", "pool", "node", "affinity", "part"}
TASK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def colour(index: int) -> str:
    return TASK_COLOURS[index % len(TASK_COLOURS)]


def sparkline(values: Sequence[float], width: int, low: float = 0.0, high: float = 1.0) -> str:
    """At most `width` levels; of a longer series, the means of its parts: single values are mostly noise."""
    if len(values) > width:
        ends = [round(i * len(values) / width) for i in range(width + 1)]
        values = [fmean(values[start:end]) for start, end in pairwise(ends)]
    span = (high - low) or 1.0
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[round(min(1.0, max(0.0, (value - low) / span)) * top)] for value in values)


def bar(share: float, width: int, style: str) -> Text:
    """A line that is full for `share` of its width, to half a cell."""
    halves = round(min(1.0, max(0.0, share)) * width * 2)
    full, half = divmod(halves, 2)
    text = Text().append("━" * full + "╸" * half, style=style)
    return text.append("─" * (width - full - half), style="bright_black")


def stacked(parts: Mapping[str, float], styles: Mapping[str, str], width: int) -> Text:
    """One bar divided in proportion, each part with its own `fill`; every part that is not zero gets its share, rounded
    at its ends."""
    total = sum(parts.values())
    ends = [0.0]
    for value in parts.values():
        ends.append(ends[-1] + (value / total * width if total else 0.0))
    text = Text()
    for (low, high), (index, name) in zip(pairwise(ends), enumerate(parts), strict=True):
        text.append(fill(index) * (round(high) - round(low)), style=styles[name])
    return text.append("─" * (width - len(text)), style="bright_black")


def fill(index: int) -> str:
    """How a stacked bar draws its part of this number."""
    return _FILLS[index % len(_FILLS)]


def label(name: str, width: int) -> Text:
    """The dim beginning of a line."""
    return Text().append(name.ljust(width), style="dim")


def clock(seconds: float | None) -> str:
    """`1:02:03` or `2:03`."""
    if seconds is None:
        return "-"
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def span(seconds: float) -> str:
    """A duration with three digits or so: `12 ms`, `3.21 s`, `4:05`."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 99.5 else clock(seconds)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def count(value: float) -> str:
    """`950`, `1.2k`, `3.4M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 99.5 or value == int(value) else f"{value:.1f}"


def percent(share: float) -> str:
    return f"{share * 100:.0f}%"


def fit(text: str, width: int) -> str:
    """Exactly `width` cells: padded, or cut with an ellipsis."""
    return text.ljust(width) if len(text) <= width else text[: max(0, width - 1)] + "…"


def table(*columns: str) -> Table:
    """An empty table; columns of numbers are right-aligned and never cut, text is folded where there is no room."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column in columns:
        text = column in _TEXT_COLUMNS
        made.add_column(column, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    return made
