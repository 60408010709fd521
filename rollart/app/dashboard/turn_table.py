"""What the log knows about each turn beyond the ledger: which engine, why, and where the time went. In columns."""

from array import array
from typing import Any

import numpy as np

from rollart.app.dashboard.phase_lanes import Names
from rollart.app.dashboard.trajectory_table import TrajectoryTable
from rollart.core import events as ev

_WHYS = 4096
_NUMBERS = {
    "turn": "H",
    "prompt": "I",
    "cached": "I",
    "queue_s": "f",
    "predicted_s": "f",
    "prefill_s": "f",
    "decode_s": "f",
}


class TurnTable:
    def __init__(self, table: TrajectoryTable) -> None:
        self._table = table
        self._row, self._engine, self._why = array("i"), array("H"), array("H")
        self._numbers: dict[str, array[Any]] = {name: array(code) for name, code in _NUMBERS.items()}
        self._engines, self._whys = Names(), Names()

    def fold(self, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.TurnDone):
            self._row.append(self._table.row_of(event.trajectory))
            self._engine.append(self._engines.number(event.engine))
            self._why.append(self._whys.number(event.why if len(self._whys) < _WHYS else "other"))
            for name, column in self._numbers.items():
                column.append(min(65535, event.turn) if name == "turn" else getattr(event, name))

    def of(self, row: int) -> dict[int, dict[str, Any]]:
        """By turn."""
        if not self._row:
            return {}
        found = {}
        for at in np.flatnonzero(np.frombuffer(self._row, dtype=np.int32) == row).tolist():
            numbers = {name: column[at] for name, column in self._numbers.items()}
            numbers |= {"engine": self._engines[self._engine[at]], "why": self._whys[self._why[at]]}
            found[int(numbers["turn"])] = numbers
        return found
