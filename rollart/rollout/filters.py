"""Which groups are trained, and how a task's running success changes its weight: state machines without time.

A group that a filter drops is replaced, because admission fills the task's share again: the replacement starts with the
newest weights, so the staleness bound holds, and the batch waits for it, so its mixture is exact. After `tries` drops
in a row the next group is trained whatever it is: a task that is solved, or hopeless, must not hold up the others.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from statistics import fmean, pstdev

from rollart.core.schedule import GroupRule, SuccessBand
from rollart.core.types import Trajectory
from rollart.rollout.groups import Group

SPREAD = 1e-6
NO_SPREAD = "no spread"
TOO_HARD = "too hard"
TOO_EASY = "too easy"
LESS_SPREAD = "less spread than others"


def succeeded(trajectory: Trajectory) -> bool:
    """As its reward function says, or else by a positive reward."""
    return (trajectory.reward or 0.0) > 0 if trajectory.success is None else trajectory.success


def spread(group: Group) -> float:
    return pstdev(trajectory.reward or 0.0 for trajectory in group.done)


class GroupFilters:
    """By task; a task without a rule keeps all of its groups."""

    def __init__(self, rules: Mapping[str, GroupRule]) -> None:
        self._rules = rules
        self._dropped: Counter[str] = Counter()  # in a row

    def verdict(self, group: Group) -> str:
        """Why a complete group is not trained; empty if it is."""
        rule = self._rules.get(group.task)
        reason = "" if rule is None else _fault(rule, group)
        if rule is None or not reason or self._dropped[group.task] >= rule.tries:
            self._dropped[group.task] = 0
            return ""
        self._dropped[group.task] += 1
        return reason

    def candidates(self, quota: Mapping[str, int]) -> dict[str, int]:
        """Ready groups of each task from which the quota is chosen."""
        rules = self._rules
        return {task: ceil(need / rules[task].keep - 1e-9) if task in rules else need for task, need in quota.items()}

    def choose(self, groups: Sequence[Group], quota: Mapping[str, int]) -> tuple[list[Group], list[Group]]:
        """Of the candidates those with most spread, as many as the quota has, and the others; both in order."""
        ranked: dict[str, list[Group]] = {task: [] for task in quota}
        for group in groups:
            ranked[group.task].append(group)
        kept = set()
        for task, need in quota.items():
            if len(ranked[task]) > need:
                ranked[task].sort(key=spread, reverse=True)
            kept |= {group.id for group in ranked[task][:need]}
        return [g for g in groups if g.id in kept], [g for g in groups if g.id not in kept]


def _fault(rule: GroupRule, group: Group) -> str:
    rewards = [trajectory.reward or 0.0 for trajectory in group.done]
    success = fmean(map(succeeded, group.done))
    if success < rule.low:
        return TOO_HARD
    if success > rule.high:
        return TOO_EASY
    return NO_SPREAD if rule.spread and max(rewards) - min(rewards) <= SPREAD else ""


class Curriculum:
    """The factor of each task's weight by its success in the last trajectories; 1 until there are enough of them."""

    def __init__(self, bands: Mapping[str, SuccessBand]) -> None:
        self._bands = bands
        self._recent = {task: deque[bool](maxlen=band.window) for task, band in bands.items()}

    def restore(self, recent: Mapping[str, Iterable[bool]]) -> None:
        for task, results in recent.items():
            if task in self._recent:
                self._recent[task].extend(results)

    def record(self, trajectory: Trajectory) -> None:
        if trajectory.task in self._recent and trajectory.outcome.trainable:
            self._recent[trajectory.task].append(succeeded(trajectory))

    def factors(self) -> dict[str, float]:
        return {task: self._factor(band, self._recent[task]) for task, band in self._bands.items()}

    def _factor(self, band: SuccessBand, recent: Sequence[bool]) -> float:
        enough = len(recent) == band.window
        return band.outside if enough and not band.low <= fmean(recent) <= band.high else 1.0
