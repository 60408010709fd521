"""Which tasks are out of the mixture for now: a small state machine; the caller passes the time.

Invariants
- A task is in the mixture, or quarantined until its next probe, or quarantined and being probed. Only trajectories of
  tasks in the mixture count.
- Every failure has one owner: the task's own environment, the reward function, which tasks may share, or the engines.
  What the engines do never counts as a failure of an environment or a reward.
- A task is quarantined when too many of the last trajectories failed by its environment or its reward function, or
  several groups in a row did. Of an engine outage only rounds count, however many trajectories it takes along: a
  failure of one that started after the last counted failure, with none in between that ended well.
- Each time a task is quarantined, or fails a probe, it waits twice as long for the next one. The backoff resets once a
  task has been in the mixture for a whole window.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rollart.core.schedule import QuarantineRule
from rollart.core.types import Outcome

MAX_BACKOFF = 64  # times the first wait
ENGINE_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Fault:
    """These tasks must be quarantined now."""

    tasks: tuple[str, ...]
    why: str


class _Owner:
    """The last results of what may fail: an environment or a reward function. `last` names n of them."""

    def __init__(self, rule: QuarantineRule, last: str) -> None:
        self._rule, self._last = rule, last
        self._failures: deque[bool] = deque(maxlen=rule.window)
        self._failed_groups = 0  # in a row

    @property
    def settled(self) -> bool:
        """Whether it was watched for a whole window."""
        return len(self._failures) == self._rule.window

    def record(self, failed: bool) -> str:
        """Why the tasks that depend on it must be quarantined, or nothing."""
        self._failures.append(failed)
        failures, count = sum(self._failures), len(self._failures)
        if not failed or count < self._rule.min_count or failures < self._rule.rate * count:
            return ""
        return f"{failures} of {self._last.format(count)} failed"

    def group_failed(self) -> str:
        self._failed_groups += 1
        if self._failed_groups < self._rule.groups:
            return ""
        return f"{self._failed_groups} groups of it in a row could not be completed"

    def group_completed(self) -> None:
        self._failed_groups = 0

    def clear(self) -> None:
        self._failures.clear()
        self._failed_groups = 0


@dataclass(slots=True)
class _Health:
    environment: _Owner
    reward: _Owner
    engine_rounds: int = 0
    engine_failed_at: float = 0.0
    times: int = 0  # quarantined or failed a probe, since the backoff was reset
    since: float = 0.0
    probe_at: float = 0.0
    probing: bool = False


class Quarantine:
    """`tasks`: names with their reward functions. A task without one has a reward of its own."""

    def __init__(self, tasks: Mapping[str, str], rule: QuarantineRule) -> None:
        self._rule = rule
        self._functions = {task: function or f"the reward of {task}" for task, function in tasks.items()}
        rewards = {name: _Owner(rule, f"the last {{}} scores by {name}") for name in self._functions.values()}
        self._active = {
            task: _Health(_Owner(rule, "its last {} trajectories"), rewards[function])
            for task, function in self._functions.items()
        }
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

    def record(self, task: str, outcome: Outcome, started: float = 0.0, ended: float = 0.0) -> Fault | None:
        """A trajectory ended."""
        health = self._active.get(task)
        if health is None or outcome in (Outcome.CANCELLED, Outcome.STALE):
            return None
        if outcome is Outcome.ENGINE_FAILED:
            return self._engine_failed(task, health, started, ended)
        if outcome is not Outcome.ENV_FAILED and (why := health.reward.record(outcome is Outcome.REWARD_FAILED)):
            return Fault(self._sharing(task), why)
        if why := health.environment.record(outcome is Outcome.ENV_FAILED):
            return Fault((task,), why)
        if outcome.trainable:
            health.engine_rounds = 0
            if health.environment.settled:
                health.times = 0
        return None

    def _engine_failed(self, task: str, health: _Health, started: float, ended: float) -> Fault | None:
        if health.engine_rounds and started < health.engine_failed_at:
            return None
        health.engine_rounds, health.engine_failed_at = health.engine_rounds + 1, ended
        if health.engine_rounds < ENGINE_ROUNDS:
            return None
        return Fault((task,), f"engines failed its trajectories in {health.engine_rounds} rounds, one after another")

    def _sharing(self, task: str) -> tuple[str, ...]:
        """The tasks in the mixture with the reward function of this one."""
        return tuple(each for each in self._active if self._functions[each] == self._functions[task])

    def group_failed(self, task: str, last: Outcome) -> Fault | None:
        """A group was given up after its `last` member failed."""
        health = self._active.get(task)
        if health is None or last is Outcome.ENGINE_FAILED:
            return None
        by_reward = last is Outcome.REWARD_FAILED
        why = (health.reward if by_reward else health.environment).group_failed()
        return Fault(self._sharing(task) if by_reward else (task,), why) if why else None

    def group_completed(self, task: str) -> None:
        if task in self._active:
            self._active[task].environment.group_completed()
            self._active[task].reward.group_completed()

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
        health.environment.clear()
        health.reward.clear()
        health.engine_rounds, health.probing = 0, False
        self._active[task] = health
        return now - health.since

    def _back_off(self, health: _Health, now: float) -> float:
        wait = self._rule.wait * min(1 << health.times, MAX_BACKOFF)
        health.times += 1
        health.probe_at, health.probing = now + wait, False
        return wait
