"""The live view of a run: a screen on a terminal, plain lines otherwise.

The event loop's thread folds events; one drawing thread takes a snapshot and draws it. They share only the metrics,
and only under the lock, which is held for microseconds: drawing itself is done on frozen values. The drawing thread
ends with the view; an error in it is raised when the view closes and never stops the run.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live

from rollart.core import events as ev
from rollart.observe.draw import clock, span
from rollart.observe.metric_table import metrics_of
from rollart.observe.metrics import Metrics
from rollart.observe.screen import screen
from rollart.observe.snapshot import Snapshot, words_of

_FRAME_S = 0.25
_IDLE_S = 1.0
_LINE_S = 10.0


class View:
    """Follows an event log. Subclasses show it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.metrics = Metrics()

    def remember(self, past: Iterable[ev.AnyEvent]) -> None:
        """Replay the events of a run that is resumed."""
        for event in past:
            self.metrics.fold(event)

    def on_event(self, event: ev.AnyEvent) -> None:
        self.metrics.fold(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveView(View):
    """A screen that is redrawn four times a second while things happen."""

    def __init__(
        self, console: Console, weights: Mapping[str, float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console)
        self._weights, self._clock = weights, clock
        self._lock = threading.Lock()
        self._changed = False
        self._offset = clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live-view", daemon=True)
        self._failure: Exception | None = None
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def on_event(self, event: ev.AnyEvent) -> None:
        with self._lock:
            self.metrics.fold(event)
            self._offset = self._clock() - event.t
            self._changed = True

    def remember(self, past: Iterable[ev.AnyEvent]) -> None:
        with self._lock:
            super().remember(past)

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        try:
            if self._failure is None:
                self._frame()
        finally:
            self._live.stop()
        if self._failure and error is None:
            raise self._failure

    def _draw(self) -> None:
        drawn = 0.0
        try:
            while not self._stop.wait(_FRAME_S):
                now = self._clock()
                if self._changed or now - drawn >= _IDLE_S:
                    drawn = now
                    self._frame()
        except Exception as error:
            self._failure = error

    def _frame(self) -> None:
        with self._lock:
            self._changed = False
            shot = self.metrics.snapshot(None if self.metrics.ended else self._clock() - self._offset)
        self._live.update(screen(shot, self._weights, self.console.width), refresh=True)


class PlainView(View):
    """One line about every ten seconds, and one at once for the first step, evaluations, warnings and other rare
    events."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._next, self._status = 0.0, ""

    def on_event(self, event: ev.AnyEvent) -> None:
        super().on_event(event)
        match event:
            case ev.Evaluated():
                run = self.metrics.run
                where = words_of(run.work if run is not None else "train").episodes
                self._say(f"version {event.version}: {event.task} {event.success:.3f} on {event.episodes} {where}")
            case ev.ServiceStarted():
                self._say(f"{event.role}: {event.name} is up after {span(event.seconds)}")
            case ev.Warned():
                self._say(f"warning: {event.message}")
            case ev.Quarantined():
                again = f"next probe in {event.wait_s:.0f} s"
                self._say(f"warning: task {event.task} is in quarantine, {again}: {event.reason}")
            case ev.Released():
                self._say(f"task {event.task} works again and is back in the mixture")
            case ev.RunStarted(emulated=emulated) if emulated:
                self._say(f"EMULATED devices: {', '.join(emulated)}")
            case ev.RolledBack():
                self._say(f"the trainer was lost and restarts from version {event.version}: {event.reason}")
            case ev.RunEnded():
                at = f" at version {event.version}" if self.metrics.run is None or self.metrics.run.steps else ""
                self._say(f"ended{at}: {event.reason}")
            case _ if event.t >= self._next or (isinstance(event, ev.StepDone) and event.version == 1):
                self._next, before = event.t + _LINE_S, self._status
                self._status = status(self.metrics.snapshot())
                if self._status != before:  # once is enough for "starting"
                    self._say(self._status)

    def _say(self, text: str) -> None:
        self.console.print(f"[{clock(self.metrics.t):>7}] {text}", markup=False, highlight=False, soft_wrap=True)


def status(shot: Snapshot) -> str:
    """The run in one line."""
    if shot.phase == "warming up" and shot.warmup:
        step, steps, loss = shot.warmup
        return f"warmup {step}/{steps}, loss {loss:.3f}"
    if shot.phase != "training":
        return shot.phase
    rewards = " ".join(f"{task.name} {task.reward:.2f}" for task in shot.tasks if task.reward is not None)
    speed = next(filter(None, (metric.text(shot.metrics) for metric in metrics_of(shot.work))), "")
    label = " on EMULATED devices" if shot.emulated else ""
    left = "" if shot.eta_s is None else f"ETA {clock(shot.eta_s)}"
    learned = (
        f"loss {shot.warmup[2]:.3f}"
        if shot.work in ("sft", "imitation") and shot.warmup
        else f"reward {rewards or '-'}"
    )
    parts = (f"step {shot.step}/{shot.steps}{label}", learned, speed, left)
    return ", ".join(filter(None, parts))


def view(console: Console, weights: Mapping[str, float]) -> View:
    """The live screen on a real terminal, plain lines otherwise."""
    live = console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")
    return LiveView(console, weights) if live else PlainView(console)
