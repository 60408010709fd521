"""What the log knows about each turn beyond the ledger: which engine, why, and where the time went."""

from typing import Any

import numpy as np

from rollart.app.dashboard.log_view import LogView, Names, PackedRows
from rollart.app.dashboard.trajectory_table import TrajectoryTable
from rollart.core import events as ev

_WHYS = 4096
_SHOWN = ("turn", "prompt", "cached", "queue_s", "predicted_s", "prefill_s", "decode_s")


class TurnTable(LogView):
    def __init__(self, table: TrajectoryTable) -> None:
        super().__init__({ev.TurnDone: self._turn})
        self._row_of = table.row_of
        self.records = PackedRows(
            row="i4",
            t="f8",
            generate_s="f4",
            env_s="f4",
            engine="u2",
            why="u2",
            turn="u2",
            prompt="u4",
            cached="u4",
            queue_s="f4",
            predicted_s="f4",
            prefill_s="f4",
            decode_s="f4",
        )
        self._engines, self._whys = Names(), Names()

    def _turn(self, event: ev.TurnDone) -> None:
        self.records.add(
            self._row_of(event.trajectory),
            event.t,
            event.generate_s,
            event.env_s,
            self._engines.number(event.engine),
            self._whys.number(event.why if len(self._whys) < _WHYS else "other"),
            min(65535, event.turn),
            event.prompt,
            event.cached,
            event.queue_s,
            event.predicted_s,
            event.prefill_s,
            event.decode_s,
        )

    def of(self, row: int) -> dict[int, dict[str, Any]]:
        """By turn."""
        found = {}
        for block in self.records.blocks():
            for at in np.flatnonzero(block["row"] == row).tolist():
                numbers: dict[str, Any] = {name: block[name][at].item() for name in _SHOWN}
                numbers |= {"engine": self._engines[block["engine"][at]], "why": self._whys[block["why"][at]]}
                found[int(numbers["turn"])] = numbers
        return found
