"""Recent values in bounded memory, by the clock of the log."""

from collections import deque
from collections.abc import Iterable


class Rate:
    """Amount per second over about the last `window` seconds, and the total. Constant time and memory."""

    def __init__(self, window: float = 30.0, buckets: int = 30) -> None:
        self.total = 0.0
        self._width = window / buckets
        self._amounts = [0.0] * buckets
        self._stamps = [-1] * buckets
        self._origin: float | None = None

    def add(self, t: float, amount: float, seconds: float = 0.0) -> None:
        """`amount` came evenly over the `seconds` that ended at `t`."""
        self.total += amount
        start = max(0.0, t - seconds)
        self._origin = start if self._origin is None else min(self._origin, start)
        last = int(t / self._width)
        first = max(int(start / self._width), last - len(self._stamps) + 1)
        for bucket in range(first, last + 1):
            low, high = max(start, bucket * self._width), min(t, (bucket + 1) * self._width)
            self._put(bucket, amount * ((high - low) / (t - start)) if t > start else amount)

    def _put(self, bucket: int, amount: float) -> None:
        slot = bucket % len(self._stamps)
        if self._stamps[slot] < bucket:
            self._stamps[slot], self._amounts[slot] = bucket, 0.0
        if self._stamps[slot] == bucket:
            self._amounts[slot] += amount

    def per_second(self, now: float) -> float:
        if self._origin is None:
            return 0.0
        oldest = int(now / self._width) - len(self._stamps) + 1
        seconds = now - max(self._origin, oldest * self._width)
        amount = sum(amount for stamp, amount in zip(self._stamps, self._amounts, strict=True) if stamp >= oldest)
        return amount / max(seconds, self._width)


class Moving:
    """The mean of the last `count` values."""

    def __init__(self, count: int = 128) -> None:
        self._values: deque[float] = deque(maxlen=count)

    def add(self, value: float) -> None:
        self._values.append(value)

    @property
    def mean(self) -> float | None:
        return mean(self._values)


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return sum(values) / len(values) if values else None
