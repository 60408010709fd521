"""The index of one run: its event log, read once and then only what was added.

Invariants: one thread reads and folds, a chunk at a time and under the lock; requests read under the same lock, so
they see whole events. The folder is never written. The thread ends when nobody has asked for a while, and the next
request starts it again where it stopped. A big log is read twice: first only the rare events, which are all that the
overview needs, then everything; `complete` says whether that has caught up.
"""

import threading
import time
from pathlib import Path
from typing import Any

from rollart.app.dashboard.feed import Feed, Machines
from rollart.app.dashboard.phase_lanes import PhaseLanes
from rollart.app.dashboard.step_curves import StepCurves
from rollart.app.dashboard.time_index import TimeIndex
from rollart.app.dashboard.trajectory_table import TrajectoryTable
from rollart.app.dashboard.turn_table import TurnTable
from rollart.core import events as ev
from rollart.core import run_folder
from rollart.core.event_log import EventReader
from rollart.observe.metrics import Metrics

_POLL_S = 0.15
_IDLE_S = 60.0
_CHUNK = 1500
_FREQUENT = (
    *(ev.TurnDone, ev.TrajectoryStarted, ev.TrajectoryEnded, ev.EnvironmentReset, ev.Scored, ev.RewardCalled),
    *(ev.PhasesChanged, ev.GroupStarted, ev.GroupReady, ev.PipelineSample, ev.EngineSample, ev.HostSample),
)
_RARE = tuple(kind for kind in ev.Event.__subclasses__() if kind not in _FREQUENT)


class RunIndex:
    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self.lock = threading.Lock()
        self.number = 0  # events read
        self.complete = False
        self.error = ""
        self.headlines = Metrics()
        self.metrics, self.lanes, self.table = Metrics(), PhaseLanes(), TrajectoryTable()
        self.turns = TurnTable(self.table)
        self.time, self.curves = TimeIndex(self.table), StepCurves()
        self.feed, self.machines = Feed(), Machines()
        self._reader = EventReader(run_folder.events_of(folder))
        self._asked = time.monotonic()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Somebody looks at it: keep reading."""
        self._asked = time.monotonic()
        with self.lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._follow, name=f"index-{self.name}", daemon=True)
                self._thread.start()

    @property
    def shown(self) -> Metrics:
        """The metrics to show: of the rare events, until all of them are read."""
        return self.metrics if self.complete else self.headlines

    def _follow(self) -> None:
        try:
            if not self.complete and not self.number:
                self._read_headlines()
            while time.monotonic() - self._asked < _IDLE_S:
                self._read_new()
                self.complete = True
                time.sleep(_POLL_S)
        except Exception as error:  # a page shows it; other runs go on
            self.error = f"the event log of {self.name} cannot be read: {error}"

    def _read_headlines(self) -> None:
        metrics = Metrics()
        for event in EventReader(run_folder.events_of(self.folder), *_RARE).read():
            metrics.fold(event)
        self.headlines = metrics

    def _read_new(self) -> None:
        chunk: list[ev.AnyEvent] = []
        for event in self._reader.read():
            chunk.append(event)
            if len(chunk) >= _CHUNK:
                self._fold(chunk)
                chunk = []
                time.sleep(0)  # requests come first
        if chunk:
            self._fold(chunk)

    def _fold(self, events: list[ev.AnyEvent]) -> None:
        views = (self.metrics, self.lanes, self.time, self.turns, self.table, self.curves, self.feed, self.machines)
        with self.lock:
            for event in events:
                for view in views:
                    view.fold(event)
            self.number += len(events)

    def state(self) -> dict[str, Any]:
        """What a page needs to decide whether to ask again."""
        shown = self.shown
        return {
            "number": self.number,
            "complete": self.complete,
            "error": self.error,
            "ended": shown.ended,
            "phase": shown.phase,
            "t": shown.t,
            "step": shown.version,
            "read_t": self.metrics.t,
        }
