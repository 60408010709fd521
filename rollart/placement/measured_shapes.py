"""The shape of each task's turns, as the event log of a run measured it."""

from collections.abc import Iterable
from pathlib import Path

from rollart.core import run_folder
from rollart.core.event_log import read_events
from rollart.core.events import AnyEvent, TrajectoryEnded, TurnDone
from rollart.placement.workload import WorkloadShape


def measured(run_dir: Path) -> dict[str, WorkloadShape]:
    """Raises RollartError if the folder holds no run."""
    return shapes(read_events(run_folder.events_of(run_dir)))


def shapes(events: Iterable[AnyEvent]) -> dict[str, WorkloadShape]:
    sums: dict[str, _Sum] = {}
    contexts: dict[str, int] = {}  # of trajectories under way: tokens so far
    for event in events:
        if isinstance(event, TurnDone):
            before = contexts.get(event.trajectory, 0) if event.turn else 0
            sums.setdefault(event.task, _Sum()).add(event.prompt - before, event.tokens, before)
            contexts[event.trajectory] = event.prompt + event.tokens
        elif isinstance(event, TrajectoryEnded):
            contexts.pop(event.trajectory, None)
    return {task: total.mean() for task, total in sums.items()}


class _Sum:
    __slots__ = ("context", "decode", "prompt", "turns")

    def __init__(self) -> None:
        self.turns = self.prompt = self.decode = self.context = 0

    def add(self, prompt: int, decode: int, context: int) -> None:
        self.turns += 1
        self.prompt += prompt
        self.decode += decode
        self.context += context

    def mean(self) -> WorkloadShape:
        return WorkloadShape(self.prompt / self.turns, self.decode / self.turns, self.context / self.turns)
