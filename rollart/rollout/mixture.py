"""The task mixture, exact in the trained batches: how many groups of each task batch `n` has, and which ones."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf

from rollart.core.schedule import WeightPlan
from rollart.rollout.groups import Group


class Mixture:
    """Of the tasks that are behind their share, the one that would first be a whole group behind gets the next group.
    So after any number of batches every task is within one group of its exact share, and equal weights that divide the
    batch give equal batches. Weights may change from batch to batch, by a plan or by factors: what a task is behind or
    ahead then stays. When tasks leave or come back, the count starts again.

    >>> [Mixture({"a": 3, "b": 1}, 2).quota(n) for n in range(2)]
    [{'a': 2, 'b': 0}, {'a': 1, 'b': 1}]
    """

    def __init__(
        self, weights: Mapping[str, float], groups: int, plans: Mapping[str, WeightPlan] | None = None
    ) -> None:
        self._weights, self._plans = dict(weights), plans or {}
        self._sizes = [(0, groups)]  # from which batch on, how many groups
        self._factors: Mapping[str, float] = {}
        self._quotas: list[dict[str, int]] = []
        self._before: list[_Standing] = []  # of each batch in _quotas
        self._standing = _Standing.of(self._weights)

    def quota(self, batch: int) -> dict[str, int]:
        while len(self._quotas) <= batch:
            self._before.append(self._standing)
            self._quotas.append(self._next(len(self._quotas)))
        return self._quotas[batch]

    def only(self, tasks: Collection[str], batch: int) -> None:
        """From `batch` on, these tasks alone, in their proportions; the past is not made up for."""
        self._rewind(batch)
        self._standing = _Standing.of([task for task in self._weights if task in tasks])

    def scale(self, factors: Mapping[str, float], batch: int) -> None:
        """From `batch` on, weights are multiplied by these."""
        if factors != self._factors:
            self._rewind(batch)
            self._factors = dict(factors)

    def resize(self, groups: int, batch: int) -> None:
        """From `batch` on, batches have this many groups."""
        if groups != self._sizes[-1][1]:
            self._rewind(batch)
            self._sizes = [*takewhile(lambda size: size[0] < batch, self._sizes), (batch, groups)]

    def _rewind(self, batch: int) -> None:
        self.quota(batch)
        self._standing = self._before[batch]
        del self._quotas[batch:], self._before[batch:]

    def _shares(self, batch: int, tasks: Collection[str]) -> dict[str, float]:
        weights = {}
        for task, weight in self._weights.items():  # always in the same order: rounding decides ties
            if task in tasks:
                plan = self._plans.get(task)
                weights[task] = weight * self._factors.get(task, 1.0) * (1.0 if plan is None else plan.at(batch))
        if not any(weights.values()):
            weights = {task: self._weights[task] for task in weights}  # the others are quarantined
        total = sum(weights.values())
        return {task: weight / total for task, weight in weights.items()}

    def _next(self, batch: int) -> dict[str, int]:
        quota = dict.fromkeys(self._weights, 0)
        standing = self._standing = self._standing.with_shares(self._shares(batch, self._standing.counts))
        for _ in range(next(groups for start, groups in reversed(self._sizes) if start <= batch)):
            task = standing.most_urgent()
            standing.counts[task] += 1
            quota[task] += 1
        return quota


@dataclass(frozen=True, slots=True)
class _Standing:
    """Groups given since shares changed, and what each task was behind then."""

    shares: dict[str, float]
    behind: dict[str, float]
    counts: dict[str, int]

    @classmethod
    def of(cls, tasks: Iterable[str]) -> "_Standing":
        counts = dict.fromkeys(tasks, 0)
        return cls({}, dict.fromkeys(counts, 0.0), counts)

    def with_shares(self, shares: dict[str, float]) -> "_Standing":
        if shares == self.shares or not self.shares:
            return _Standing(shares, self.behind, dict(self.counts))
        total = sum(self.counts.values())
        behind = {task: self.behind[task] + share * total - self.counts[task] for task, share in self.shares.items()}
        return _Standing(shares, behind, dict.fromkeys(shares, 0))

    def most_urgent(self) -> str:
        total = sum(self.counts.values()) + 1
        owed = {task: self.behind[task] + share * total - self.counts[task] for task, share in self.shares.items()}
        due = [task for task, amount in owed.items() if amount > 1e-9]
        return min(due, key=self._deadline)

    def _deadline(self, task: str) -> float:
        """Groups of all tasks until this one is a whole group behind."""
        share = self.shares[task]
        return (self.counts[task] + 1 - self.behind[task]) / share if share else inf


def choose_batch(
    quota: Mapping[str, int], groups: Mapping[str, Mapping[str, Group]], window: float
) -> list[Group] | None:
    """The batch, or None while some task cannot fill its share.

    `groups` are the open ones of each task in start order. Of these only the first `window` x quota compete, so short
    groups cannot overtake long ones for ever: with window 1 the order is strict, with a window as wide as the pipeline
    whatever is ready goes.
    """
    batch: list[Group] = []
    for task, need in quota.items():
        reach = max(need, int(need * window))
        ready = _first_ready(need, islice(groups[task].values(), reach), reach - need)
        if len(ready) < need:
            return None
        batch += ready
    return batch


def _first_ready(need: int, groups: Iterable[Group], spare: int) -> list[Group]:
    """Stops once more than `spare` are not ready: this runs whenever a group becomes ready."""
    ready: list[Group] = []
    for group in groups:
        if len(ready) == need:
            break
        if group.ready:
            ready.append(group)
        elif (spare := spare - 1) < 0:
            break
    return ready
