"""How many tokens a turn decodes: a moving average per task and turn."""

from collections.abc import Mapping

LAST_TURN = 15  # later turns count as this one
RATE = 0.1
PRIOR_WEIGHT = 4  # measurements that outweigh a declared prior


class DecodeLengths:
    """`priors` are the expected tokens per turn of each task, before anything is measured.

    The first measurements count for more: the average is a plain mean until its rate reaches `RATE`. A turn that has
    not been measured is expected to be like the last one before it that was.
    """

    def __init__(self, priors: Mapping[str, float] | None = None) -> None:
        self._priors = dict(priors or {})
        self._means: dict[tuple[str, int], float] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def expected(self, task: str, turn: int, max_tokens: int) -> float:
        means = self._means
        mean = means.get((task, turn if turn < LAST_TURN else LAST_TURN))
        if mean is None:
            for known in range(min(turn, LAST_TURN) - 1, -1, -1):
                if (mean := means.get((task, known))) is not None:
                    break
            else:
                mean = self._priors.get(task, max_tokens / 2)
        return mean if mean < max_tokens else float(max_tokens)

    def record(self, task: str, turn: int, tokens: int) -> None:
        key = (task, turn if turn < LAST_TURN else LAST_TURN)
        prior = self._priors.get(task)
        count = self._counts.get(key, 0) + 1
        mean = self._means.get(key, tokens if prior is None else prior)
        rate = max(RATE, 1 / (count + (0 if prior is None else PRIOR_WEIGHT)))
        self._means[key] = mean + rate * (tokens - mean)
        self._counts[key] = count
