"""What happened when, for the timeline: slices of trajectories and of services in columns, drawn at any zoom.

A window with few trajectories is answered slice by slice; a wide one as the number of trajectories in each phase over
time, so that a day of a run costs as much to draw as a second of it.
"""

from array import array
from typing import Any

import numpy as np

from rollart.app.dashboard.phase_lanes import Names
from rollart.app.dashboard.trajectory_table import TrajectoryTable
from rollart.core import events as ev

KINDS = ("reset", "generate", "step", "score")
_RESET, _GENERATE, _STEP, _SCORE = range(4)
_MAX_SLICES = 4000
_MAX_TRACK_SLICES = 3000


class Slices:
    """Columns: where (a trajectory's row or a track), what (a kind or a version), start and seconds."""

    def __init__(self) -> None:
        self.where, self.what = array("i"), array("i")
        self.start, self.seconds = array("d"), array("f")

    def add(self, where: int, what: int, end: float, seconds: float) -> None:
        self.where.append(where)
        self.what.append(what)
        self.start.append(end - seconds)
        self.seconds.append(seconds)

    def window(self, low: float, high: float) -> tuple[np.ndarray[Any, Any], ...]:
        """where, what, start and end of the slices that touch the window."""
        if not self.start:
            return tuple(np.zeros(0, dtype=np.float64) for _ in range(4))
        start = np.array(np.frombuffer(self.start, dtype=np.float64))
        end = start + np.frombuffer(self.seconds, dtype=np.float32)
        inside = (end >= low) & (start <= high)
        where = np.frombuffer(self.where, dtype=np.int32)[inside]
        return where, np.frombuffer(self.what, dtype=np.int32)[inside], start[inside], end[inside]


class TimeIndex:
    def __init__(self, table: TrajectoryTable) -> None:
        self._table = table
        self._trajectories, self._services = Slices(), Slices()
        self._tracks = Names()
        self._eval_began: dict[int, float] = {}
        self._warming: float | None = None

    def fold(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.TurnDone():
                row = self._table.row_of(event.trajectory)
                acted = event.t - event.env_s
                self._trajectories.add(row, _GENERATE, acted, event.generate_s)
                if event.env_s > 0:
                    self._trajectories.add(row, _STEP, event.t, event.env_s)
            case ev.EnvironmentReset():
                self._trajectories.add(self._table.row_of(event.trajectory), _RESET, event.t, event.seconds)
            case ev.Scored():
                self._trajectories.add(self._table.row_of(event.trajectory), _SCORE, event.t, event.seconds)
            case _:
                self._service(event)

    def _service(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.BatchTaken():
                self._add("trainer waits", event.step, event.t, event.waited_s)
            case ev.StepDone():
                self._add("trainer steps", event.version, event.t, event.seconds)
            case ev.Published():
                self._add("publish", event.version, event.t, event.seconds)
            case ev.Checkpointed():
                self._add("checkpoint", event.version, event.t, event.seconds)
            case ev.EngineSwapped():
                self._add(f"swap {event.engine}", event.version, event.t, event.seconds)
            case ev.ServiceStarted():
                self._add(f"start {event.name}", -1, event.t, event.seconds)
            case ev.WorkStarted(work="evaluation"):
                self._eval_began[event.version] = event.t
            case ev.Evaluated() if event.version in self._eval_began:
                self._add(f"evaluate {event.task}", event.version, event.t, event.t - self._eval_began[event.version])
            case ev.WarmupStep():
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
        where, what, start, end = self._services.window(low, high)
        if len(where) > _MAX_TRACK_SLICES:  # of those within one pixel of a track, one is enough
            pixel = ((start - low) / max(high - low, 1e-9) * pixels).astype(np.int64)
            _, kept = np.unique(where * (pixels + 2) + np.clip(pixel, -1, pixels), return_index=True)
            where, what, start, end = where[kept], what[kept], start[kept], end[kept]
        tracks = []
        for number, name in enumerate(self._tracks):
            mine = where == number
            if mine.any():
                slices = np.stack([start[mine], end[mine], what[mine]], axis=1)
                tracks.append({"name": name, "slices": np.round(slices, 4).tolist()})
        return tracks

    def _trajectory_slices(self, low: float, high: float, pixels: int) -> dict[str, Any]:
        rows, kinds, start, end = self._trajectories.window(low, high)
        if len(rows) > _MAX_SLICES:
            return {"density": _density(kinds, start, end, low, high, pixels), "kinds": KINDS, "slices": None}
        known = sorted({int(row) for row in rows if row >= 0})
        names = {row: position for position, row in enumerate(known)}
        slices = [
            (names.get(int(row), -1), int(kind), round(float(a), 4), round(float(b), 4))
            for row, kind, a, b in zip(rows, kinds, start, end, strict=True)
        ]
        trajectories = [self._table.row(row) for row in known]
        return {"slices": slices, "trajectories": trajectories, "kinds": KINDS, "density": None}


def _density(
    kinds: np.ndarray[Any, Any],
    start: np.ndarray[Any, Any],
    end: np.ndarray[Any, Any],
    low: float,
    high: float,
    pixels: int,
) -> list[list[float]]:
    """For each kind, the mean number of trajectories in it in each of `buckets` parts of the window."""
    buckets = max(16, min(1024, pixels // 2))
    width = max(high - low, 1e-9) / buckets
    found = []
    for kind in range(len(KINDS)):
        mine = kinds == kind
        a = np.clip((start[mine] - low) / width, 0, buckets)
        b = np.clip((end[mine] - low) / width, 0, buckets)
        # The integral of the number of open slices, at every bucket's edge, by the exact overlap at both ends.
        found.append(np.round(_overlap(a, buckets) - _overlap(b, buckets), 3).tolist())
    return found


def _overlap(edge: np.ndarray[Any, Any], buckets: int) -> np.ndarray[Any, Any]:
    """In each bucket, the sum over edges of how much of the bucket lies after the edge."""
    whole = np.minimum(edge.astype(np.int64), buckets - 1)
    part = np.bincount(whole, weights=1.0 - (edge - whole), minlength=buckets)
    before = np.cumsum(np.bincount(whole, minlength=buckets))
    result: np.ndarray[Any, Any] = part + np.concatenate([[0], before[:-1]])
    return result
