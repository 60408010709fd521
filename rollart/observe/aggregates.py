"""Values summed up in bounded memory, by the clock of the log: rates, means, quantiles."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import Protocol

from rollart.observe.snapshot import DurationQuantiles

_BUCKET_RATIO = 1.02  # width of a bucket over that of the one before: quantiles are within 1%
_MIN_S = 1e-5


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
        start = t - seconds if t > seconds else 0.0
        if self._origin is None or start < self._origin:
            self._origin = start
        last, first = int(t / self._width), int(start / self._width)
        if first == last:
            self._put(last, amount)
            return
        for bucket in range(max(first, last - len(self._stamps) + 1), last + 1):
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


class MovingMean:
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


class QuantileSketch:
    """Quantiles of any number of durations, in constant memory.

    >>> sketch = QuantileSketch()
    >>> for seconds in range(1, 1001):
    ...     sketch.add(seconds)
    >>> round(sketch.at(0.5), -1), round(sketch.at(0.99), -1)
    (500.0, 980.0)
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0

    def add(self, seconds: float) -> None:
        self._buckets[round(math.log(max(seconds, _MIN_S), _BUCKET_RATIO))] += 1
        self.count += 1

    def at(self, share: float) -> float:
        """The middle of the bucket that the quantile falls into; 0 without values."""
        before = 0
        for bucket, count in sorted(self._buckets.items()):
            before += count
            if before >= share * self.count:
                return _BUCKET_RATIO**bucket
        return 0.0

    def quantiles(self) -> DurationQuantiles:
        return DurationQuantiles(self.at(0.5), self.at(0.95), self.at(0.99))


class Aggregate(Protocol):
    """How a metric sums up its values; `total` is that of all of them."""

    total: float

    def add(self, t: float, value: float, seconds: float) -> None: ...

    def recent(self, now: float) -> float | None: ...

    def overall(self, total: float, seconds: float) -> float | None:
        """Over RL, which added `total` in `seconds`."""
        ...

    def since_step(self, t: float) -> float | None:
        """Since the call before."""
        ...


class RateValue(Rate):
    """None before the first amount: a run of robots has no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._step = (0.0, 0.0)

    def recent(self, now: float) -> float | None:
        return None if self._origin is None else self.per_second(now)

    def overall(self, total: float, seconds: float) -> float | None:
        return None if self._origin is None else total / max(seconds, 1e-9)

    def since_step(self, t: float) -> float:
        (last, total), self._step = self._step, (t, self.total)
        return (self.total - total) / max(1e-9, t - last)


class MeanValue:
    def __init__(self) -> None:
        self.total = 0.0
        self._count = 0
        self._recent, self._step = MovingMean(), list[float]()

    def add(self, t: float, value: float, seconds: float) -> None:
        self.total += value
        self._count += 1
        self._recent.add(value)
        self._step.append(value)

    def recent(self, now: float) -> float | None:
        return self._recent.mean

    def overall(self, total: float, seconds: float) -> float | None:
        return self.total / self._count if self._count else None

    def since_step(self, t: float) -> float | None:
        values, self._step = self._step, []
        return mean(values)


class LastValue:
    def __init__(self) -> None:
        self.total = 0.0
        self._last: float | None = None

    def add(self, t: float, value: float, seconds: float) -> None:
        self.total, self._last = self.total + value, value

    def recent(self, now: float) -> float | None:
        return self._last

    def overall(self, total: float, seconds: float) -> float | None:
        return self._last

    def since_step(self, t: float) -> float | None:
        return self._last
