"""Cells of a table that takes long: each result is kept in a folder as soon as it is there.

    python -m benchmarks.algorithms --keep DIR --minutes 6    # again until nothing is missing

The last of these commands prints the whole table. A cell is named by everything that decides its result, so commands
with different settings may share a folder. The code is not part of the name: results of another commit need another
folder.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", type=Path, help="folder for the results of cells; what is there is not run again")
    parser.add_argument("--minutes", type=float, help="start no cell after that; needs --keep to go on later")


class Cells:
    """`missing` has the names of the cells that were asked for when the time was up."""

    def __init__(self, folder: Path, benchmark: str, minutes: float | None = None) -> None:
        self.folder = folder
        self.missing: list[str] = []
        self._file = folder / f"{benchmark}.jsonl"
        self._ends = None if minutes is None else time.monotonic() + 60 * minutes
        self._known: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            lines = self._file.read_text().splitlines()
            self._known = {_name(row["cell"]): row["result"] for row in map(json.loads, lines)}

    @property
    def seconds_left(self) -> float | None:
        """Until no cell may begin; None: there is no such time."""
        return None if self._ends is None else self._ends - time.monotonic()

    def get(self, make: Callable[[], Any], **cell: Any) -> Any:
        """The result of a cell, made now unless it is known. None if the time is up."""
        name = _name(cell)
        if name in self._known:
            return self._known[name]
        if self.seconds_left is not None and self.seconds_left <= 0:
            self.missing.append(name)
            return None
        result = self._known[name] = make()
        with self._file.open("a") as file:
            file.write(json.dumps({"cell": cell, "result": result}) + "\n")
        return result


def _name(cell: dict[str, Any]) -> str:
    return json.dumps(cell, sort_keys=True)


@contextmanager
def kept_cells(benchmark: str, options: argparse.Namespace) -> Iterator[Cells]:
    """In the folder of `--keep`, or in one that is removed at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        yield Cells(options.keep or Path(scratch), benchmark, options.minutes)
