"""What happened when, for the timeline: slices of trajectories and of services, drawn at any zoom.

A window with few slices is answered slice by slice; a wide one as the number of trajectories in each phase over time,
so that a day of a run costs as much to draw as a second of it. Slices are looked through block by block: blocks
outside the window are skipped, and what is computed for one is dropped before the next.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from rollart.app.dashboard.log_view import Columns, LogView, Names, PackedRows
from rollart.app.dashboard.trajectory_table import TrajectoryTable
from rollart.app.dashboard.turn_table import TurnTable
from rollart.core import events as ev
from rollart.core.types import Outcome

KINDS = ("reset", "generate", "step", "score")
_RESET, _GENERATE, _STEP, _SCORE = range(4)
_MAX_SLICES = 4000
_MAX_TRACK_SLICES = 3000
_MAX_ALIKE = 8  # tracks that differ in the name of a worker; more are one
_FAILURES, _FAILED = "failures", (Outcome.ENV_FAILED, Outcome.ENGINE_FAILED, Outcome.REWARD_FAILED)

Slices = tuple[Columns, Columns, Columns, Columns]  # where, what, start and end


class TimeIndex(LogView):
    def __init__(self, table: TrajectoryTable, turns: TurnTable) -> None:
        super().__init__(
            {
                ev.EnvironmentReset: lambda event: self._around_turns(event, _RESET),
                ev.Scored: lambda event: self._around_turns(event, _SCORE),
                ev.BatchTaken: lambda event: self._add("trainer waits", event.step, event.t, event.waited_s),
                ev.StepDone: lambda event: self._add("trainer steps", event.version, event.t, event.seconds),
                ev.Published: lambda event: self._add("publish", event.version, event.t, event.seconds),
                ev.Checkpointed: lambda event: self._add("checkpoint", event.version, event.t, event.seconds),
                ev.EngineSwapped: lambda event: self._add(
                    f"swap {event.engine}", event.version, event.t, event.seconds
                ),
                ev.ServiceStarted: lambda event: self._add(f"start {event.name}", -1, event.t, event.seconds),
                ev.WorkStarted: self._work_started,
                ev.Evaluated: self._evaluated,
                ev.WarmupStep: self._warmup,
                ev.EnvironmentLost: lambda event: self._add(_FAILURES, -1, event.t, 0.0),
                ev.ServiceEnded: lambda event: self._add(_FAILURES, -1, event.t, 0.0),
                ev.TrajectoryEnded: self._ended,
            }
        )
        self._table, self._turns = table, turns
        self._others, self._services = _slices(), _slices()
        self._tracks = Names()
        self._eval_began: dict[int, float] = {}
        self._warming: float | None = None

    def _around_turns(self, event: ev.EnvironmentReset | ev.Scored, kind: int) -> None:
        self._others.add(self._table.row_of(event.trajectory), kind, event.t, event.seconds)

    def _work_started(self, event: ev.WorkStarted) -> None:
        if event.work == "evaluation":
            self._eval_began[event.version] = event.t

    def _ended(self, event: ev.TrajectoryEnded) -> None:
        if event.outcome in _FAILED:
            self._add(_FAILURES, -1, event.t, 0.0)

    def _evaluated(self, event: ev.Evaluated) -> None:
        if event.version in self._eval_began:
            self._add(f"evaluate {event.task}", event.version, event.t, event.t - self._eval_began[event.version])

    def _warmup(self, event: ev.WarmupStep) -> None:
        began = event.t if self._warming is None else self._warming
        self._add("warmup", event.step, event.t, event.t - began)
        self._warming = event.t

    def _add(self, track: str, what: int, end: float, seconds: float) -> None:
        self._services.add(self._tracks.number(track), what, end, seconds)

    def window(self, low: float, high: float, pixels: int) -> dict[str, Any]:
        return {
            "from": low,
            "to": high,
            "tracks": self._track_slices(low, high, pixels),
            **self._trajectory_slices(low, high, pixels),
        }

    def _track_slices(self, low: float, high: float, pixels: int) -> list[dict[str, Any]]:
        where, what, start, end = _joined(_inside(self._services, low, high))
        if len(where) > _MAX_TRACK_SLICES:  # of those within one pixel of a track, one is enough
            pixel = ((start - low) / max(high - low, 1e-9) * pixels).astype(np.int64)
            _, kept = np.unique(where * (pixels + 2) + np.clip(pixel, -1, pixels), return_index=True)
            where, what, start, end = where[kept], what[kept], start[kept], end[kept]
        tracks = []
        for name, numbers in self._track_names().items():
            mine = np.isin(where, numbers)
            if mine.any():
                slices = np.stack([start[mine], end[mine], what[mine]], axis=1)
                tracks.append({"name": name, "slices": np.round(slices, 4).tolist()})
        return tracks

    def _track_names(self) -> dict[str, list[int]]:
        """The tracks that are drawn, and their numbers: the swaps of many engines are one track."""
        alike = Counter(name.partition(" ")[0] for name in self._tracks)
        found: dict[str, list[int]] = {}
        for number, name in enumerate(self._tracks):
            first = name.partition(" ")[0]
            many = f"{first} ({alike[first]})" if alike[first] > _MAX_ALIKE else name
            found.setdefault(many, []).append(number)
        return found

    def _trajectory_slices(self, low: float, high: float, pixels: int) -> dict[str, Any]:
        found: list[Slices] = []
        for part in self._parts(low, high):
            found.append(part)
            if sum(len(rows) for rows, *_ in found) > _MAX_SLICES:
                found.clear()
                return {"density": self._density(low, high, pixels), "kinds": KINDS, "slices": None}
        rows, kinds, start, end = _joined(iter(found))
        known = sorted({int(row) for row in rows if row >= 0})
        names = {row: position for position, row in enumerate(known)}
        slices = [
            (names.get(int(row), -1), int(kind), round(float(a), 4), round(float(b), 4))
            for row, kind, a, b in zip(rows, kinds, start, end, strict=True)
        ]
        trajectories = [self._table.row(row) for row in known]
        return {"slices": slices, "trajectories": trajectories, "kinds": KINDS, "density": None}

    def _parts(self, low: float, high: float) -> Iterator[Slices]:
        """The slices of trajectories in the window."""
        yield from _inside(self._others, low, high)
        for block in self._turns.records.blocks():
            if block["t"][-1] < low:
                continue
            end = block["t"]
            acted = end - block["env_s"]
            stepped = (end >= low) & (acted <= high) & (block["env_s"] > 0)
            yield _part(block["row"], _STEP, acted, end, stepped)
            began = acted - block["generate_s"]
            yield _part(block["row"], _GENERATE, began, acted, (acted >= low) & (began <= high))

    def _density(self, low: float, high: float, pixels: int) -> list[list[float]]:
        """For each kind, the mean number of trajectories in it in each of `buckets` parts of the window."""
        buckets = max(16, min(1024, pixels // 2))
        width = max(high - low, 1e-9) / buckets
        found = np.zeros((len(KINDS), buckets))
        for _, kinds, start, end in self._parts(low, high):
            for kind in np.unique(kinds).tolist():
                mine = kinds == kind
                a = np.clip((start[mine] - low) / width, 0, buckets)
                b = np.clip((end[mine] - low) / width, 0, buckets)
                # The integral of the number of open slices, at every bucket's edge, by the exact overlap at both ends.
                found[kind] += _overlap(a, buckets) - _overlap(b, buckets)
        density: list[list[float]] = np.round(found, 3).tolist()
        return density


def _slices() -> PackedRows:
    """Where: a trajectory's row or a track; what: a kind or a version; the end and the seconds before it."""
    return PackedRows(where="i4", what="i4", t="f8", seconds="f4")


def _inside(slices: PackedRows, low: float, high: float) -> Iterator[Slices]:
    for block in slices.blocks():
        start, end = block["t"] - block["seconds"], block["t"]
        inside = (end >= low) & (start <= high)
        if inside.any():
            yield block["where"][inside], block["what"][inside], start[inside], end[inside]


def _part(rows: Columns, kind: int, start: Columns, end: Columns, inside: Columns) -> Slices:
    chosen = rows[inside]
    return chosen, np.full(len(chosen), kind), start[inside], end[inside]


def _joined(parts: Iterator[Slices]) -> Slices:
    where, what, start, end = zip(*[(np.zeros(0),) * 4, *parts], strict=True)
    return np.concatenate(where), np.concatenate(what), np.concatenate(start), np.concatenate(end)


def _overlap(edge: Columns, buckets: int) -> Columns:
    """In each bucket, the sum over edges of how much of the bucket lies after the edge."""
    whole = np.minimum(edge.astype(np.int64), buckets - 1)
    part = np.bincount(whole, weights=1.0 - (edge - whole), minlength=buckets)
    before = np.cumsum(np.bincount(whole, minlength=buckets))
    result: Columns = part + np.concatenate([[0], before[:-1]])
    return result
