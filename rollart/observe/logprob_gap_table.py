"""How well the engine's logprobs agreed with the trainer's, over a run, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from rollart.observe.draw import count
from rollart.observe.snapshot import StepPoint
from rollart.observe.tables import table


@dataclass(slots=True)
class _Whole:
    tokens: int = 0
    size: float = 0.0
    most: float = 0.0
    last: float = 0.0


def gaps(history: Sequence[StepPoint]) -> Table:
    """By task and age: the mean over all trained tokens, the largest, and the mean of the last step that had any."""
    cells: dict[tuple[str, int], _Whole] = {}
    for point in history:
        for gap in point.gaps:
            whole = cells.setdefault((gap.task, gap.age), _Whole())
            whole.tokens += gap.tokens
            whole.size += gap.mean * gap.tokens
            whole.most = max(whole.most, gap.max)
            whole.last = gap.mean
    rows = table("task", "versions old", "tokens", "mean gap", "largest", "last step")
    for (task, age), whole in sorted(cells.items()):
        sizes = (whole.size / whole.tokens, whole.most, whole.last)
        rows.add_row(task, str(age), count(float(whole.tokens)), *(f"{size:.2g}" for size in sizes))
    return rows
