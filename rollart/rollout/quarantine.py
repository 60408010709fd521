"""Which tasks are out of the mixture for now: a small state machine; the caller passes the time.

Invariants
- A task is in the mixture, or quarantined until its next probe, or quarantined and being probed. Only trajectories of
  tasks in the mixture count.
- A task is quarantined when too many of its last trajectories failed, or when several groups in a row failed.
- Each time a task is quarantined, or fails a probe, it waits twice as long for the next one. The backoff resets once a
  task has been in the mixture for a whole window.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollart.core.schedule import QuarantineRule
from rollart.core.types import Outcome

MAX_BACKOFF = 64  # times the first wait


@dataclass(slots=True)
class _Health:
    failures: deque[bool]  # of the last trajectories
    failed_groups: int = 0  # in a row
    times: int = 0  # quarantined or failed a probe, since the backoff was reset
    since: float = 0.0
    probe_at: float = 0.0
    probing: bool = False


class Quarantine:
    def __init__(self, tasks: Iterable[str], rule: QuarantineRule) -> None:
        self._rule = rule
        self._active = {task: _Health(deque(maxlen=rule.window)) for task in tasks}
        self._out: dict[str, _Health] = {}

    @property
    def active(self) -> list[str]:
        """Tasks in the mixture."""
        return list(self._active)

    @property
    def times(self) -> dict[str, int]:
        """Quarantined tasks, and how often each was quarantined or failed a probe."""
        return {task: health.times for task, health in self._out.items()}

    def restore(self, times: Mapping[str, int], now: float) -> None:
        """These tasks were quarantined when an earlier run stopped. They can be probed at once."""
        for task, count in times.items():
            health = self._out[task] = self._active.pop(task)
            health.times, health.since, health.probe_at = count, now, now

    def record(self, task: str, outcome: Outcome) -> str | None:
        """A trajectory ended; returns why its task must be quarantined now, if it must."""
        health = self._active.get(task)
        if health is None or outcome in (Outcome.CANCELLED, Outcome.STALE):
            return None
        health.failures.append(not outcome.trainable)
        failures, count = sum(health.failures), len(health.failures)
        if count < self._rule.min_count or failures < self._rule.rate * count:
            if count == self._rule.window:
                health.times = 0
            return None
        return f"{failures} of its last {count} trajectories failed"

    def group_failed(self, task: str) -> str | None:
        """Returns why the task must be quarantined now, if it must."""
        health = self._active.get(task)
        if health is None:
            return None
        health.failed_groups += 1
        if health.failed_groups < self._rule.groups:
            return None
        return f"{health.failed_groups} groups of it in a row could not be completed"

    def group_completed(self, task: str) -> None:
        if task in self._active:
            self._active[task].failed_groups = 0

    def quarantine(self, task: str, now: float) -> float:
        """Returns the seconds until the task is probed."""
        health = self._out[task] = self._active.pop(task)
        health.since = now
        return self._back_off(health, now)

    def due(self, now: float) -> list[str]:
        """Tasks to probe now. Each is returned once."""
        tasks = [task for task, health in self._out.items() if not health.probing and now >= health.probe_at]
        for task in tasks:
            self._out[task].probing = True
        return tasks

    def probe_failed(self, task: str, now: float) -> float:
        """Returns the seconds until the task is probed again."""
        return self._back_off(self._out[task], now)

    def release(self, task: str, now: float) -> float:
        """The task is back in the mixture; only its backoff is kept. Returns the seconds that it was quarantined."""
        health = self._out.pop(task)
        health.failures.clear()
        health.failed_groups, health.probing = 0, False
        self._active[task] = health
        return now - health.since

    def _back_off(self, health: _Health, now: float) -> float:
        wait = self._rule.wait * min(1 << health.times, MAX_BACKOFF)
        health.times += 1
        health.probe_at, health.probing = now + wait, False
        return wait
