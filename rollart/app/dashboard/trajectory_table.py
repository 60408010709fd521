"""All trajectories of a run in columns: about a hundred bytes each, so that a million fit into memory and a filter
over them takes milliseconds."""

from array import array
from collections import defaultdict
from typing import Any

import numpy as np

from rollart.app.dashboard.log_view import LogView, Names
from rollart.core import events as ev

RUNNING = "running"
_REASONS = 256  # different failure reasons; more are one
_COLUMNS = {
    "task": "H",
    "outcome": "B",
    "reward": "f",
    "success": "b",
    "turns": "I",
    "tokens": "I",
    "seconds": "f",
    "started": "d",
    "version": "i",
    "step": "i",
    "reason": "H",
    "held_out": "b",
}
_EMPTY = {"reward": float("nan"), "seconds": float("nan"), "success": -1, "step": -1}
SORTABLE = ("id", "task", "outcome", "reward", "success", "turns", "tokens", "seconds", "started", "version", "age")


class TrajectoryTable(LogView):
    def __init__(self) -> None:
        super().__init__(
            {
                ev.TrajectoryStarted: self._start,
                ev.TrajectoryEnded: self._end,
                ev.BatchTaken: self._taken,
                ev.GroupDropped: self._dropped,
                ev.RunStarted: lambda event: self._rows.clear(),
            }
        )
        self.ids: list[str] = []
        self.tasks, self.outcomes, self.reasons = Names(), Names(), Names()
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}
        self._rows: dict[str, int] = {}  # of those that have not ended
        self._groups: defaultdict[str, list[int]] = defaultdict(list)  # rows that wait to be trained
        self.outcomes.number(RUNNING)
        self.reasons.number("")

    def __len__(self) -> int:
        return len(self.ids)

    def row_of(self, id: str) -> int:
        """-1 for one that is not under way."""
        return self._rows.get(id, -1)

    def _taken(self, event: ev.BatchTaken) -> None:
        for group in event.ids:
            for row in self._groups.pop(group, ()):
                self._columns["step"][row] = event.step

    def _dropped(self, event: ev.GroupDropped) -> None:
        self._groups.pop(event.group, None)

    def _start(self, event: ev.TrajectoryStarted) -> None:
        self._rows[event.trajectory] = len(self.ids)
        self.ids.append(event.trajectory)
        values = {
            "task": self.tasks.number(event.task),
            "started": event.t,
            "version": event.version,
            "held_out": event.held_out,
        }
        for name, column in self._columns.items():
            column.append(values.get(name, _EMPTY.get(name, 0)))

    def _end(self, event: ev.TrajectoryEnded) -> None:
        row = self._rows.pop(event.trajectory, None)
        if row is None:
            return
        columns = self._columns
        columns["outcome"][row] = self.outcomes.number(event.outcome.value)
        columns["reward"][row] = float("nan") if event.reward is None else event.reward
        columns["success"][row] = -1 if event.success is None else event.success
        columns["turns"][row], columns["tokens"][row] = event.turns, event.tokens
        columns["seconds"][row] = event.seconds
        known = len(self.reasons) < _REASONS or event.reason in self.reasons
        columns["reason"][row] = self.reasons.number(event.reason[:200] if known else "other reasons")
        if not event.held_out and event.outcome.trainable:
            self._groups[event.group].append(row)

    def _column(self, name: str) -> np.ndarray[Any, Any]:
        """A copy: an array that is exported cannot grow."""
        if name == "age":
            step = self._column("step")
            return np.where(step < 0, -1, step - self._column("version"))
        code = _COLUMNS[name]
        return np.array(np.frombuffer(self._columns[name], dtype=np.dtype(code)) if self.ids else [], dtype=code)

    def page(self, query: dict[str, str], offset: int, limit: int) -> dict[str, Any]:
        """The rows that match, sorted, from `offset`."""
        chosen = np.flatnonzero(self._matching(query))
        by = query.get("sort", "started")
        if by in SORTABLE and by != "id" and len(chosen):
            keys = self._column(by)[chosen].astype(np.float64)
            chosen = chosen[np.argsort(np.where(np.isnan(keys), -np.inf, keys), kind="stable")]
        elif by == "id":
            chosen = np.array(sorted(chosen, key=lambda row: self.ids[row]), dtype=np.int64)
        if query.get("order", "desc") == "desc":
            chosen = chosen[::-1]
        return {
            "total": len(self.ids),
            "matching": len(chosen),
            "rows": [self.row(int(row)) for row in chosen[offset : offset + limit]],
            "tasks": list(self.tasks),
            "outcomes": list(self.outcomes),
            "reasons": [reason for reason in self.reasons if reason],
            "rewards": self._histogram(chosen),
        }

    def _matching(self, query: dict[str, str]) -> np.ndarray[Any, Any]:
        mask = np.ones(len(self.ids), dtype=bool)
        for name, names in (("task", self.tasks), ("outcome", self.outcomes), ("reason", self.reasons)):
            if wanted := query.get(name):
                number = names.index(wanted) if wanted in names else -1
                mask &= self._column(name) == number
        if split := query.get("split"):
            mask &= self._column("held_out") == (split == "held_out")
        if success := query.get("success"):
            mask &= self._column("success") == int(success == "yes")
        for name in ("reward", "turns", "tokens", "seconds", "version", "age"):
            for suffix, compare in (("min", np.greater_equal), ("max", np.less_equal)):
                if bound := _number(query.get(f"{name}_{suffix}")):
                    mask &= compare(self._column(name), bound[0])
        if text := query.get("id"):
            mask &= np.fromiter((text in id for id in self.ids), dtype=bool, count=len(self.ids))
        return mask

    def _histogram(self, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
        rewards = self._column("reward")[rows]
        rewards = rewards[np.isfinite(rewards)]
        if not len(rewards):
            return {"counts": [], "low": 0.0, "high": 0.0}
        counts, edges = np.histogram(rewards, bins=24)
        return {"counts": counts.tolist(), "low": float(edges[0]), "high": float(edges[-1])}

    def row(self, row: int) -> dict[str, Any]:
        columns = {name: column[row] for name, column in self._columns.items()}
        reward, seconds = columns["reward"], columns["seconds"]
        step, success = columns["step"], columns["success"]
        return {
            "id": self.ids[row],
            "task": self.tasks[columns["task"]],
            "outcome": self.outcomes[columns["outcome"]],
            "reward": None if reward != reward else reward,
            "success": None if success < 0 else bool(success),
            "turns": columns["turns"],
            "tokens": columns["tokens"],
            "seconds": None if seconds != seconds else seconds,
            "started": columns["started"],
            "version": columns["version"],
            "age": None if step < 0 else step - columns["version"],
            "reason": self.reasons[columns["reason"]],
            "held_out": bool(columns["held_out"]),
        }


def _number(text: str | None) -> tuple[float] | None:
    """None for what is no number: a filter that is still being typed."""
    try:
        return None if not text else (float(text),)
    except ValueError:
        return None
