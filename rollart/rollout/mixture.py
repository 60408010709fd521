"""The task mixture, exact in the trained batches: how many groups of each task batch `n` holds."""

from collections.abc import Collection, Mapping


class Mixture:
    """Slot by slot, of the tasks that are behind their share the one that would first be a whole group behind gets the
    next one. So after any number of batches every task is within one group of its exact share, and equal weights that
    divide the batch give equal batches. When tasks leave or come back, the count begins anew.

    >>> [Mixture({"a": 3, "b": 1}, 2).quota(n) for n in range(2)]
    [{'a': 2, 'b': 0}, {'a': 1, 'b': 1}]
    """

    def __init__(self, weights: Mapping[str, float], groups: int) -> None:
        self._weights = dict(weights)
        self._groups = groups
        self._quotas: list[dict[str, int]] = []
        self._begin(self._weights)

    def quota(self, batch: int) -> dict[str, int]:
        while len(self._quotas) <= batch:
            self._quotas.append(self._next())
        return self._quotas[batch]

    def only(self, tasks: Collection[str], batch: int) -> None:
        """From `batch` on, these tasks alone, in their proportions; nobody makes up for what was before."""
        if batch:
            self.quota(batch - 1)
        del self._quotas[batch:]
        self._begin(tasks)

    def _begin(self, tasks: Collection[str]) -> None:
        weights = {task: weight for task, weight in self._weights.items() if task in tasks}
        total = sum(weights.values())  # in one order, whoever asks: rounding decides ties
        self._shares = {task: weight / total for task, weight in weights.items()}
        self._given = dict.fromkeys(self._shares, 0)

    def _next(self) -> dict[str, int]:
        quota = dict.fromkeys(self._weights, 0)
        for _ in range(self._groups):
            slot = sum(self._given.values()) + 1
            behind = [name for name, share in self._shares.items() if share * slot - self._given[name] > 1e-9]
            task = min(behind, key=lambda name: (self._given[name] + 1) / self._shares[name])
            self._given[task] += 1
            quota[task] += 1
        return quota
