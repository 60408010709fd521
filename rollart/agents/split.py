"""Which of some tasks an episode plays, and which are never trained. Standard library only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

HELD_OUT = 5  # one task in so many is for evaluation alone


def choose(names: Sequence[str], seed: int, held_out: bool) -> int:
    """An index. Which tasks are held out depends on their names alone; a single task is for both."""
    order = sorted(range(len(names)), key=lambda index: hashlib.sha256(names[index].encode()).digest())
    kept = max(1, len(order) // HELD_OUT) if len(order) > 1 else 0
    allowed = (order[:kept] if held_out else order[kept:]) or order
    return allowed[seed % len(allowed)]
