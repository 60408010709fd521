"""Which tasks are left out of the mixture for now: a small state machine, told the time by whoever asks.

Invariants
- A task is in the mixture, or out of it until its next probe, or out and being probed. Only tasks that are in count.
- A task goes out when too many of its last trajectories failed, or when group after group of it could not be completed.
- Each time a task goes out, or fails a probe, it waits twice as long for the next one. A task that has been in for a
  whole window since is forgiven.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollart.core.schedule import QuarantineRule
from rollart.core.types import Outcome

LONGEST = 64  # times the first wait


@dataclass(slots=True)
class _Health:
    last: deque[bool]  # True for a failure
    given_up: int = 0  # groups in a row
    times: int = 0  # that it went out or failed a probe, since it was forgiven
    since: float = 0.0  # when it went out
    probe_at: float = 0.0
    probed: bool = False


class Quarantine:
    def __init__(self, tasks: Iterable[str], rule: QuarantineRule) -> None:
        self._rule = rule
        self._in = {task: _Health(deque(maxlen=rule.window)) for task in tasks}
        self._out: dict[str, _Health] = {}

    @property
    def active(self) -> list[str]:
        """Tasks in the mixture."""
        return list(self._in)

    @property
    def times(self) -> dict[str, int]:
        """Tasks that are out, and how often they went out or failed a probe."""
        return {task: health.times for task, health in self._out.items()}

    def restore(self, times: Mapping[str, int], now: float) -> None:
        """These tasks were out when an earlier run stopped. They can be probed at once, for a while has passed."""
        for task, count in times.items():
            health = self._out[task] = self._in.pop(task)
            health.times, health.since, health.probe_at = count, now, now

    def saw(self, task: str, outcome: Outcome) -> str | None:
        """A trajectory ended; why its task must go out now, if it must."""
        health = self._in.get(task)
        if health is None or outcome in (Outcome.CANCELLED, Outcome.STALE):
            return None
        health.last.append(not outcome.trainable)
        failures, count = sum(health.last), len(health.last)
        if count < self._rule.min_count or failures < self._rule.rate * count:
            if count == self._rule.window:
                health.times = 0
            return None
        return f"{failures} of its last {count} trajectories failed"

    def gave_up(self, task: str) -> str | None:
        """A group could not be completed; why its task must go out now, if it must."""
        health = self._in.get(task)
        if health is None:
            return None
        health.given_up += 1
        if health.given_up < self._rule.groups:
            return None
        return f"{health.given_up} groups of it in a row could not be completed"

    def completed(self, task: str) -> None:
        if task in self._in:
            self._in[task].given_up = 0

    def leave_out(self, task: str, now: float) -> float:
        """The task goes out; in how many seconds it will be probed."""
        health = self._out[task] = self._in.pop(task)
        health.since = now
        return self._postpone(health, now)

    def due(self, now: float) -> list[str]:
        """Tasks to probe now. Each is asked for once."""
        tasks = [task for task, health in self._out.items() if not health.probed and now >= health.probe_at]
        for task in tasks:
            self._out[task].probed = True
        return tasks

    def probe_failed(self, task: str, now: float) -> float:
        """In how many seconds the task will be probed again."""
        return self._postpone(self._out[task], now)

    def take_back(self, task: str, now: float) -> float:
        """The task is in again, with nothing held against it but how often it was out; for how many seconds it was."""
        health = self._out.pop(task)
        health.last.clear()
        health.given_up, health.probed = 0, False
        self._in[task] = health
        return now - health.since

    def _postpone(self, health: _Health, now: float) -> float:
        wait = self._rule.wait * min(1 << health.times, LONGEST)
        health.times += 1
        health.probe_at, health.probed = now + wait, False
        return wait
