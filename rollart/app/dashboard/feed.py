"""What a person should notice, newest first, and the machines: placement, engines, hosts, weights."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from rollart.app.dashboard.log_view import LogView
from rollart.core import events as ev

_NOTICES, _SAMPLES, _SWAPS = 400, 720, 64


class Feed(LogView):
    """Warnings and other rare events, as sentences with a level: bad, warn, good or info."""

    def __init__(self) -> None:
        sentences: dict[type[ev.Event], Callable[[Any], tuple[str, str] | None]] = {
            ev.Warned: lambda e: ("warn", e.message),
            ev.Quarantined: lambda e: ("bad", f"task {e.task} is in quarantine: {e.reason}"),
            ev.Released: lambda e: ("good", f"task {e.task} works again after {e.seconds:.0f} s in quarantine"),
            ev.RolledBack: lambda e: ("bad", f"the trainer restarts from version {e.version}: {e.reason}"),
            ev.ServiceEnded: lambda e: ("bad", f"{e.role} {e.name} ended: {e.reason}"),
            ev.RunStarted: lambda e: ("info", f"resumed from version {e.version}" if e.resumed else "the run started"),
            ev.RunEnded: _ended,
            ev.Evaluated: _evaluated,
        }
        super().__init__({kind: partial(self._add, sentence) for kind, sentence in sentences.items()})
        self.handlers[ev.EnvironmentLost] = self._lost
        self.notices: deque[dict[str, Any]] = deque(maxlen=_NOTICES)
        self.lost_environments = 0

    def _lost(self, event: ev.EnvironmentLost) -> None:
        self.lost_environments += 1

    def _add(self, sentence: Callable[[Any], tuple[str, str] | None], event: ev.AnyEvent) -> None:
        if found := sentence(event):
            self.notices.append({"t": event.t, "level": found[0], "text": found[1][:2000]})


def _ended(event: ev.RunEnded) -> tuple[str, str]:
    level = "good" if event.reason == "finished" else "bad"
    return level, f"the run ended at version {event.version}: {event.reason}"


def _evaluated(event: ev.Evaluated) -> tuple[str, str] | None:
    text = f"{event.task}: {event.success:.0%} of {event.episodes} episodes succeed at version {event.version}"
    return ("info", text) if event.final else None


class Machines(LogView):
    """The last state of every service, and a short history of each."""

    def __init__(self) -> None:
        super().__init__(
            {
                ev.EngineSample: self._engine,
                ev.PipelineSample: lambda event: self.pipeline.append(event),
                ev.HostSample: self._host,
                ev.GatewaySample: self._gateway,
                ev.Published: lambda event: self.publications.append(event),
                ev.EngineSwapped: self._swapped,
                ev.ServiceStarted: self._service,
                ev.Placed: self._placed,
                ev.RunStarted: lambda event: self.engines.clear(),
                ev.RunEnded: lambda event: self.pipeline.clear(),
            }
        )
        self.engines: dict[str, ev.EngineSample] = {}
        self.pipeline: deque[ev.PipelineSample] = deque(maxlen=_SAMPLES)
        self.hosts: dict[str, ev.HostSample] = {}
        self.gateway: ev.GatewaySample | None = None
        self.publications: deque[ev.Published] = deque(maxlen=_SWAPS)
        self.swaps: dict[str, deque[ev.EngineSwapped]] = {}
        self.services: dict[str, ev.ServiceStarted] = {}
        self._pools: dict[str, str] = {}  # of engines and other workers
        self._busy: dict[str, deque[tuple[float, float, int, int]]] = {}

    def _swapped(self, event: ev.EngineSwapped) -> None:
        self.swaps.setdefault(event.engine, deque(maxlen=_SWAPS)).append(event)

    def _service(self, event: ev.ServiceStarted) -> None:
        self.services[event.name] = event

    def _placed(self, event: ev.Placed) -> None:
        self._pools[event.name] = event.pool

    def _host(self, event: ev.HostSample) -> None:
        self.hosts[event.node] = event

    def _gateway(self, event: ev.GatewaySample) -> None:
        self.gateway = event

    def _engine(self, event: ev.EngineSample) -> None:
        last = self.engines.get(event.engine)
        self.engines[event.engine] = event
        if last is not None and event.t > last.t and event.busy_s >= last.busy_s:
            busy = min(1.0, (event.busy_s - last.busy_s) / (event.t - last.t))
            history = self._busy.setdefault(event.engine, deque(maxlen=120))
            history.append((event.t, round(busy, 4), event.running, event.waiting))

    def fan_out(self, nodes: Mapping[str, str]) -> dict[str, Any]:
        """The way of the newest version that an engine has, as a tree: `engines` that fetched it from the publisher,
        and `below` each one those that it relayed to, or that found it in its memory. `nodes` has each engine's."""
        for published in reversed(self.publications):
            all_swaps = (swap for swaps in self.swaps.values() for swap in swaps if swap.version == published.version)
            if swapped := {swap.engine: swap for swap in all_swaps}:
                return {"published": msgspec.to_builtins(published), "engines": _tree(published, swapped, nodes)}
        return {"published": msgspec.to_builtins(self.publications[-1]) if self.publications else None, "engines": []}

    def engine_rows(self) -> list[dict[str, Any]]:
        rows = []
        for name, sample in self.engines.items():
            history = self._busy.get(name, ())
            row = msgspec.to_builtins(sample)
            row["pool"] = self._pools.get(name, "")
            row["history"] = [[t, busy, running, waiting] for t, busy, running, waiting in history]
            rows.append(row)
        return rows


def _tree(
    published: ev.Published, swaps: Mapping[str, ev.EngineSwapped], nodes: Mapping[str, str]
) -> list[dict[str, Any]]:
    relays = {swap.relay: name for name, swap in swaps.items() if swap.relay}
    fetched = {nodes.get(name, ""): name for name, swap in swaps.items() if swap.hops}  # others find it
    above: dict[str, str] = {}
    for name, swap in swaps.items():
        largest = max(swap.hops, key=lambda hop: hop.bytes, default=None)
        source = relays.get(largest.source) if largest else fetched.get(nodes.get(name, ""))
        if source is not None and not _is_above(name, source, above):
            above[name] = source
    rows = {name: _swap_row(published, swap, nodes.get(name, ""), relays) for name, swap in swaps.items()}
    for name, source in above.items():
        rows[source]["below"].append(rows[name])
    return [row for name, row in rows.items() if name not in above]


def _is_above(name: str, source: str, above: Mapping[str, str]) -> bool:
    """Whether `source` has it from `name`: the address of a relay can be used again by another."""
    at: str | None = source
    while at is not None and at != name:
        at = above.get(at)
    return at == name


def _swap_row(published: ev.Published, swap: ev.EngineSwapped, node: str, relays: Mapping[str, str]) -> dict[str, Any]:
    hops = [{**msgspec.to_builtins(hop), "engine": relays.get(hop.source, "")} for hop in swap.hops]
    row: dict[str, Any] = msgspec.to_builtins(swap)
    return row | {"node": node, "after_s": max(0.0, swap.t - published.t), "hops": hops, "below": []}
