"""The index of one run: its event log, read once and then only what was added.

Invariants: one thread reads and folds, a chunk at a time and under the lock; requests read under the same lock, so
they see whole events. The folder is never written. The thread ends when nobody has asked for a while, and the next
request starts it again where it stopped. A big log is read twice: first only the rare events, which are all that the
overview needs and a hundredth of the work, then everything; `complete` says whether that has caught up. Both are shown
while they are read, so nothing waits for the end of a log.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
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
from rollart.observe.summary import unwritten_end

_POLL_S = 0.05
_IDLE_S = 60.0
_CHUNK, _RARE_CHUNK = 1000, 50  # events that are folded at once
_FREQUENT = (
    *(ev.TurnDone, ev.TrajectoryStarted, ev.TrajectoryEnded, ev.EnvironmentReset, ev.Scored, ev.RewardCalled),
    *(ev.PhasesChanged, ev.GroupStarted, ev.GroupReady, ev.PipelineSample, ev.EngineSample, ev.HostSample),
)
_RARE = tuple(kind for kind in ev.Event.__subclasses__() if kind not in _FREQUENT)


class RunIndex:
    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, folder.name
        self._lock, self._next, self._starting = threading.Lock(), threading.Lock(), threading.Lock()
        self.number = 0  # events read
        self.complete = False
        self.error = ""
        self.headlines, self.headlines_read = Metrics(), False
        self.metrics, self.lanes, self.table = Metrics(), PhaseLanes(), TrajectoryTable()
        self.turns = TurnTable(self.table)
        self.time, self.curves = TimeIndex(self.table, self.turns), StepCurves()
        self.feed, self.machines = Feed(), Machines()
        self._folds = self._handlers()
        self._reader = EventReader(run_folder.events_of(folder))
        self._asked = time.monotonic()
        self._thread: threading.Thread | None = None

    def watch(self) -> None:
        """Somebody looks at it: keep reading."""
        self._asked = time.monotonic()
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._follow, name=f"index-{self.name}", daemon=True)
                self._thread.start()

    @contextmanager
    def whole_events(self) -> Iterator[None]:
        """Nothing changes inside. Who waits for the lock holds `_next`, so the reader cannot take it twice in a row."""
        with self._next:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @property
    def shown(self) -> Metrics:
        """The metrics to show: of the rare events, until all of them are read."""
        return self.metrics if self.complete else self.headlines

    def _handlers(self) -> dict[type[ev.Event], tuple[Callable[[Any], None], ...]]:
        """The functions that each kind of event goes to. Turns look up the row of a trajectory, so they come before its
        end is noted."""
        views = (self.lanes, self.time, self.turns, self.table, self.curves, self.feed, self.machines)
        return {
            kind: (self.metrics.fold, *(view.handlers[kind] for view in views if kind in view.handlers))
            for kind in ev.Event.__subclasses__()
        }

    def _follow(self) -> None:
        try:
            if not self.headlines_read:
                self._read_headlines()
            while time.monotonic() - self._asked < _IDLE_S:
                self._read_new()
                self.complete = True
                time.sleep(_POLL_S)
        except Exception as error:  # a page shows it; other runs go on
            self.error = f"the event log of {self.name} cannot be read: {error}"

    def _read_headlines(self) -> None:
        gone = self._controller_gone()
        self.headlines = Metrics()
        self._read(EventReader(run_folder.events_of(self.folder), *_RARE), self._fold_headlines, _RARE_CHUNK)
        if gone:
            self._fold_headlines(unwritten_end(self.headlines, self.folder))
        self.headlines_read = True

    def _read_new(self) -> None:
        gone, before = not self.metrics.ended and self._controller_gone(), self.number
        self._read(self._reader, self._fold, _CHUNK)
        if gone and self.number == before:
            with self.whole_events():
                self._fold(unwritten_end(self.metrics, self.folder))

    def _controller_gone(self) -> bool:
        """Asked before the log is read: the end that a controller writes is there before it is gone."""
        return run_folder.has_controller(self.folder) is False

    def _read(self, reader: EventReader, fold: Callable[[list[ev.AnyEvent]], None], size: int) -> None:
        events = reader.read()
        while chunk := list(islice(events, size)):
            with self.whole_events():
                fold(chunk)

    def _fold_headlines(self, events: list[ev.AnyEvent]) -> None:
        for event in events:
            self.headlines.fold(event)

    def _fold(self, events: list[ev.AnyEvent]) -> None:
        folds = self._folds
        for event in events:
            for fold in folds[type(event)]:
                fold(event)
        self.number += len(events)

    def state(self) -> dict[str, Any]:
        """What a page needs to decide whether to ask again."""
        shown = self.shown
        return {
            "number": self.number,
            "complete": self.complete,
            "headlines": self.headlines_read,
            "error": self.error,
            "ended": shown.ended,
            "phase": shown.phase,
            "t": shown.t,
            "step": shown.version,
            "read_t": self.metrics.t,
        }
