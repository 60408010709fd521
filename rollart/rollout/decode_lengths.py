"""The measured shape of tasks: how many tokens a turn decodes, as an exponential average per task and turn."""

from collections.abc import Mapping

LAST_TURN = 15  # later turns count as this one
RATE = 0.1
TRUST = 4  # measurements that outweigh a declared prior


class DecodeLengths:
    """`priors` are the decoded tokens per turn that a user's declaration leads us to expect, by task.

    The first measurements count for more: the average is a plain mean until its rate reaches `RATE`. A turn that was
    not seen yet is expected to be like the last one before it that was.
    """

    def __init__(self, priors: Mapping[str, float] | None = None) -> None:
        self._priors = dict(priors or {})
        self._means: dict[tuple[str, int], float] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def decoded(self, task: str, turn: int, most: int) -> float:
        """Expected tokens of the answer, which can have at most `most`."""
        means = self._means
        for known in range(min(turn, LAST_TURN), -1, -1):
            if (mean := means.get((task, known))) is not None:
                return min(mean, float(most))
        return min(self._priors.get(task, most / 2), float(most))

    def saw(self, task: str, turn: int, tokens: int) -> None:
        key = (task, min(turn, LAST_TURN))
        prior = self._priors.get(task)
        count = self._counts.get(key, 0) + 1
        mean = self._means.get(key, tokens if prior is None else prior)
        rate = max(RATE, 1 / (count + (0 if prior is None else TRUST)))
        self._means[key] = mean + rate * (tokens - mean)
        self._counts[key] = count
