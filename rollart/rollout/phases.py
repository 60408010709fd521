"""Which phase trajectories are in, sampled: a phase shorter than the interval between two samples costs no event."""

from collections.abc import Callable
from typing import Protocol

from rollart.core.events import EventSink, PhasesChanged


class InPhase(Protocol):
    """An attempt: `phase` is a sentence about what it does, for people."""

    id: str
    phase: str


class PhaseChanges:
    """The phase that each trajectory entered since the last sample, for those that are still in it."""

    def __init__(self) -> None:
        self._phases: dict[str, str] = {}

    def enter(self, attempt: InPhase, name: str, what: str) -> None:
        attempt.phase = what
        self._phases[attempt.id] = name

    def leave(self, attempt: InPhase) -> None:
        self._phases.pop(attempt.id, None)

    def sample(self, sink: EventSink, pool_of: Callable[[str], str]) -> None:
        """Emit what changed, if anything did. `pool_of` gives the pool that answers a trajectory, "" if none does."""
        if not self._phases:
            return
        changed, self._phases = self._phases, {}
        phases: dict[str, list[str]] = {}
        for id, phase in changed.items():
            phases.setdefault(phase, []).append(id)
        pools: dict[str, list[int]] = {}
        for place, id in enumerate(phases.get("generating", ())):
            if pool := pool_of(id):
                pools.setdefault(pool, []).append(place)
        sink.emit(PhasesChanged(phases=phases, pools=pools))
