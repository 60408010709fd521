"""What a person should notice, newest first, and the machines: placement, engines, hosts, weights."""

from collections import deque
from typing import Any

import msgspec

from rollart.core import events as ev

_NOTICES, _SAMPLES, _SWAPS = 400, 720, 64


class Feed:
    """Warnings and other rare events, as sentences with a level: bad, warn, good or info."""

    def __init__(self) -> None:
        self.notices: deque[dict[str, Any]] = deque(maxlen=_NOTICES)
        self.lost_environments = 0

    def fold(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.Warned():
                self._add(event, "warn", event.message)
            case ev.Quarantined():
                self._add(event, "bad", f"task {event.task} is in quarantine: {event.reason}")
            case ev.Released():
                self._add(event, "good", f"task {event.task} works again after {event.seconds:.0f} s in quarantine")
            case ev.RolledBack():
                self._add(event, "bad", f"the trainer restarts from version {event.version}: {event.reason}")
            case ev.ServiceEnded():
                self._add(event, "bad", f"{event.role} {event.name} ended: {event.reason}")
            case ev.EnvironmentLost():
                self.lost_environments += 1
            case ev.RunStarted():
                text = f"resumed from version {event.version}" if event.resumed else "the run started"
                self._add(event, "info", text)
            case ev.RunEnded():
                level = "good" if event.reason == "finished" else "bad"
                self._add(event, level, f"the run ended at version {event.version}: {event.reason}")
            case ev.Evaluated(final=True):
                text = f"{event.task}: {event.success:.0%} of {event.episodes} held-out episodes at version"
                self._add(event, "info", f"{text} {event.version}")

    def _add(self, event: ev.AnyEvent, level: str, text: str) -> None:
        self.notices.append({"t": event.t, "level": level, "text": text[:2000]})


class Machines:
    """The last state of every service, and a short history of each."""

    def __init__(self) -> None:
        self.engines: dict[str, ev.EngineSample] = {}
        self.pipeline: deque[ev.PipelineSample] = deque(maxlen=_SAMPLES)
        self.hosts: dict[str, ev.HostSample] = {}
        self.gateway: ev.GatewaySample | None = None
        self.publications: deque[ev.Published] = deque(maxlen=_SWAPS)
        self.swaps: dict[str, deque[ev.EngineSwapped]] = {}
        self.services: dict[str, ev.ServiceStarted] = {}
        self._busy: dict[str, deque[tuple[float, float, int, int]]] = {}

    def fold(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.EngineSample():
                self._engine(event)
            case ev.PipelineSample():
                self.pipeline.append(event)
            case ev.HostSample():
                self.hosts[event.node] = event
            case ev.GatewaySample():
                self.gateway = event
            case ev.Published():
                self.publications.append(event)
            case ev.EngineSwapped():
                self.swaps.setdefault(event.engine, deque(maxlen=_SWAPS)).append(event)
            case ev.ServiceStarted():
                self.services[event.name] = event
            case ev.RunStarted():
                self.engines.clear()
            case ev.RunEnded():
                self.pipeline.clear()

    def _engine(self, event: ev.EngineSample) -> None:
        last = self.engines.get(event.engine)
        self.engines[event.engine] = event
        if last is not None and event.t > last.t and event.busy_s >= last.busy_s:
            busy = min(1.0, (event.busy_s - last.busy_s) / (event.t - last.t))
            history = self._busy.setdefault(event.engine, deque(maxlen=120))
            history.append((event.t, round(busy, 4), event.running, event.waiting))

    def engine_rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, sample in self.engines.items():
            history = self._busy.get(name, ())
            row = msgspec.to_builtins(sample)
            row["history"] = [[t, busy, running, waiting] for t, busy, running, waiting in history]
            rows.append(row)
        return rows
