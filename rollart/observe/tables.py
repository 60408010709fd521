"""The look of all our tables."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

_TEXT = {"task", "trajectory", "role", "name", "reason", "outcome", "about", "device", "mostly"}
_TEXT |= {"pool", "node", "affinity", "tokens per turn"}


def table(*columns: str) -> Table:
    """Light, and ready for `add_row`; numbers stand to the right."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for column in columns:
        made.add_column(column, justify="left" if column in _TEXT else "right", no_wrap=column != "about")
    return made
