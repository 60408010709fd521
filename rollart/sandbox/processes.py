"""What /proc tells about processes that may end at any moment. Standard library only."""

from __future__ import annotations

import contextlib
from pathlib import Path

PROC = Path("/proc")


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def state(pid: int, proc: Path = PROC) -> str:
    """The kernel's letter; X once it is gone."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def is_dead(pid: int, proc: Path = PROC) -> bool:
    """Though its parent may not have taken notice."""
    return state(pid, proc) in "ZX"


def resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
