"""Trajectories that are under way, each in one phase, from the moment it starts until it is trained or lost.

Every change has a number, so a page that has seen number n asks only for what changed after it.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

from rollart.app.dashboard.log_view import LogView, Names
from rollart.core import events as ev

PHASES = ("waiting", "resetting", "generating", "stepping", "scoring", "ready", "training")
WAITING, RESETTING, GENERATING, STEPPING, SCORING, READY, TRAINING = range(len(PHASES))
_GONE = 50_000  # ends that are kept for pages that ask for changes; one further behind gets everything


@dataclass(slots=True)
class LiveTrajectory:
    id: str
    group: str
    task: int
    phase: int
    pool: int
    since: float
    version: int
    turn: int
    held_out: bool
    change: int = 0


class PhaseLanes(LogView):
    def __init__(self) -> None:
        super().__init__(
            {
                ev.TurnDone: self._turn,
                ev.PhasesChanged: self._phases,
                ev.TrajectoryStarted: self._start,
                ev.EnvironmentReset: lambda event: self._move(event.trajectory, GENERATING, event.t),
                ev.TrajectoryEnded: self._end,
                ev.BatchTaken: self._taken,
                ev.StepDone: self._trained,
                ev.GroupDropped: lambda event: self._drop_group(event.group),
                ev.RunStarted: lambda event: self._clear(),
                ev.RunEnded: lambda event: self._clear(),
            }
        )
        self.change = 0
        self.tasks, self.pools = Names(), Names()
        self._live: dict[str, LiveTrajectory] = {}  # in order of their last change
        self._groups: defaultdict[str, list[str]] = defaultdict(list)
        self._steps: dict[int, list[str]] = {}
        self._gone: deque[tuple[int, str]] = deque(maxlen=_GONE)
        self._reset_at = 0  # changes before this one are unknown to `since`

    def __len__(self) -> int:
        return len(self._live)

    def _phases(self, event: ev.PhasesChanged) -> None:
        for phase, ids in event.phases.items():
            for id in ids:
                self._move(id, PHASES.index(phase), event.t)
        generating = event.phases.get("generating", [])
        for pool, places in event.pools.items():
            number = self.pools.number(pool)
            for place in places:
                self._answer(generating[place], number)

    def _taken(self, event: ev.BatchTaken) -> None:
        self._steps[event.step] = event.ids
        for group in event.ids:
            for id in self._groups.get(group, ()):
                self._move(id, TRAINING, event.t)

    def _trained(self, event: ev.StepDone) -> None:
        for group in self._steps.pop(event.version - 1, ()):
            self._drop_group(group)

    def _start(self, event: ev.TrajectoryStarted) -> None:
        live = LiveTrajectory(
            id=event.trajectory,
            group=event.group,
            task=self.tasks.number(event.task),
            phase=WAITING,
            pool=-1,
            since=event.t,
            version=event.version,
            turn=0,
            held_out=event.held_out,
        )
        self._live.pop(event.trajectory, None)
        self._put(live)

    def _put(self, live: LiveTrajectory) -> None:
        self.change += 1
        live.change = self.change
        self._live[live.id] = live

    def _move(self, id: str, phase: int, t: float) -> None:
        live = self._live.get(id)
        if live is not None and live.phase != phase:
            del self._live[id]
            live.phase, live.since = phase, t
            self._put(live)

    def _answer(self, id: str, pool: int) -> None:
        live = self._live.get(id)
        if live is not None and live.pool != pool:
            del self._live[id]
            live.pool = pool
            self._put(live)

    def _turn(self, event: ev.TurnDone) -> None:
        live = self._live.pop(event.trajectory, None)
        if live is not None:
            live.phase, live.since, live.turn = GENERATING, event.t, event.turn + 1
            live.version, live.pool = event.version, self.pools.number(event.pool)
            self._put(live)

    def _end(self, event: ev.TrajectoryEnded) -> None:
        if event.held_out or not event.outcome.trainable:
            self._forget(event.trajectory)
        elif event.trajectory in self._live:
            self._groups[event.group].append(event.trajectory)
            self._move(event.trajectory, READY, event.t)

    def _drop_group(self, group: str) -> None:
        for id in self._groups.pop(group, ()):
            self._forget(id)

    def _forget(self, id: str) -> None:
        if self._live.pop(id, None) is not None:
            self.change += 1
            if len(self._gone) == _GONE:
                self._reset_at = self._gone[0][0]
            self._gone.append((self.change, id))

    def _clear(self) -> None:
        self._live.clear()
        self._groups.clear()
        self._steps.clear()
        self._gone.clear()
        self.change += 1
        self._reset_at = self.change

    def counts(self) -> dict[str, dict[str, int]]:
        """Trajectories by task and phase."""
        found: dict[str, Counter[str]] = {task: Counter() for task in self.tasks}
        for live in self._live.values():
            found[self.tasks[live.task]][PHASES[live.phase]] += 1
        return {task: dict(counts) for task, counts in found.items()}

    def since(self, change: int) -> dict[str, Any]:
        """Rows that changed after `change`, and ids that are gone; `all` if the page must begin again."""
        whole = change <= 0 or change < self._reset_at or change > self.change
        rows, gone = [], []
        for live in reversed(self._live.values()):
            if not whole and live.change <= change:
                break
            row = (live.id, live.task, live.phase, live.pool, live.since, live.version, live.turn, live.held_out)
            rows.append(row)
        if not whole:
            for number, id in reversed(self._gone):
                if number <= change:
                    break
                if id not in self._live:
                    gone.append(id)
        return {
            "change": self.change,
            "all": whole,
            "rows": rows,
            "gone": gone,
            "phases": PHASES,
            "tasks": list(self.tasks),
            "pools": list(self.pools),
        }
