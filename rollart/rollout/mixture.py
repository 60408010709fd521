"""The task mixture, exact in the trained batches: how many groups of each task batch `n` has, and which ones."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from rollart.rollout.groups import Group


class Mixture:
    """Of the tasks that are behind their share, the one that would first be a whole group behind gets the next group.
    So after any number of batches every task is within one group of its exact share, and equal weights that divide the
    batch give equal batches. When tasks leave or come back, the count starts again.

    >>> [Mixture({"a": 3, "b": 1}, 2).quota(n) for n in range(2)]
    [{'a': 2, 'b': 0}, {'a': 1, 'b': 1}]
    """

    def __init__(self, weights: Mapping[str, float], groups: int) -> None:
        self._weights = dict(weights)
        self._groups = groups
        self._quotas: list[dict[str, int]] = []
        self._restart(self._weights)

    def quota(self, batch: int) -> dict[str, int]:
        while len(self._quotas) <= batch:
            self._quotas.append(self._next())
        return self._quotas[batch]

    def only(self, tasks: Collection[str], batch: int) -> None:
        """From `batch` on, these tasks alone, in their proportions; the past is not made up for."""
        if batch:
            self.quota(batch - 1)
        del self._quotas[batch:]
        self._restart(tasks)

    def _restart(self, tasks: Collection[str]) -> None:
        weights = {task: weight for task, weight in self._weights.items() if task in tasks}
        total = sum(weights.values())  # always in the same order: rounding decides ties
        self._shares = {task: weight / total for task, weight in weights.items()}
        self._counts = dict.fromkeys(self._shares, 0)

    def _next(self) -> dict[str, int]:
        quota = dict.fromkeys(self._weights, 0)
        for _ in range(self._groups):
            total = sum(self._counts.values()) + 1
            behind = [name for name, share in self._shares.items() if share * total - self._counts[name] > 1e-9]
            task = min(behind, key=lambda name: (self._counts[name] + 1) / self._shares[name])
            self._counts[task] += 1
            quota[task] += 1
        return quota


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
