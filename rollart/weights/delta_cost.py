"""Predicts whether a delta arrives before the plain bucket would, per bucket and link.

A plain bucket takes its bytes over the speed of the link. A delta has fewer bytes, but must be encoded and decoded. Its
size is predicted from a sample, the speed of the codec measured on this machine.
"""

import threading
import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from rollart.weights.delta import Buffer, changed_shares, decode, encode, plane_bytes

ANCHOR_EVERY = 16  # versions; an anchor has no base and is sent in full, so that chains of deltas stay short

TRIALS, TRIAL_BYTES, TRIAL_SHARE = 3, 1 << 20, 0.1

_measuring = threading.Lock()
RUNS, RUN = 64, 4096


@dataclass(frozen=True, slots=True)
class Codec:
    """Bytes of a bucket encoded, and decoded, per second."""

    encode: float
    decode: float

    @property
    def seconds_per_byte(self) -> float:
        return 1 / self.encode + 1 / self.decode


@dataclass(frozen=True, slots=True)
class Link:
    """Speed of a link, and of the codec at its ends."""

    bytes_per_s: float
    codec: Codec

    def seconds(self, size: int, delta_bytes: float | None = None) -> float:
        """For a bucket of `size` bytes: plain, or as a delta of `delta_bytes`, whose steps do not overlap."""
        if delta_bytes is None:
            return size / self.bytes_per_s
        return size * self.codec.seconds_per_byte + delta_bytes / self.bytes_per_s

    def pays(self, base: Buffer, new: Buffer, item_bytes: int) -> bool:
        """Whether a delta is predicted to be faster. Free where the link is faster than the codec."""
        size = memoryview(new).nbytes
        if self.seconds(size, 0) >= self.seconds(size):
            return False
        return self.seconds(size, predicted_bytes(base, new, item_bytes)) < self.seconds(size)


def predicted_bytes(base: Buffer, new: Buffer, item_bytes: int) -> int:
    """Predicted size of the delta, from evenly spread runs of elements: a fraction of the work of encoding."""
    old, made = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    items = len(made) // item_bytes
    cuts = [slice(0, items * item_bytes)]
    if items > RUNS * RUN:
        starts = np.linspace(0, items - RUN, RUNS).astype(np.int64) * item_bytes
        cuts = [slice(start, start + RUN * item_bytes) for start in starts.tolist()]
    sample = [np.concatenate([side[cut] for cut in cuts]) for side in (old, made)]
    _, shares = changed_shares(sample[0].data, sample[1].data, item_bytes)
    return round(sum(plane_bytes(items, share * items) for share in shares))


def break_even(size: int, delta_bytes: int, codec: Codec) -> float:
    """Links slower than this, in bytes per second, are faster with the delta; 0 if none is."""
    return max(0, size - delta_bytes) / (size * codec.seconds_per_byte)


def measured_codec() -> Codec:
    """Of this machine, measured once on a megabyte of which a tenth has changed: the best of `TRIALS` by CPU time,
    because the cores may be busy."""
    with _measuring:
        return _measured_codec()


@cache
def _measured_codec() -> Codec:
    draw = np.random.default_rng(0)
    base = draw.integers(0, 256, TRIAL_BYTES, dtype=np.uint8)
    new = base.copy()
    new[draw.random(len(new)) < TRIAL_SHARE] ^= 1
    into = np.zeros_like(new)
    best = [float("inf"), float("inf")]
    for _ in range(TRIALS):
        began = time.thread_time()
        delta = encode(base.data, new.data, 2)
        encoded = time.thread_time()
        assert delta is not None
        decode(delta, base.data, into.data)
        best = [min(best[0], encoded - began), min(best[1], time.thread_time() - encoded)]
    return Codec(TRIAL_BYTES / max(best[0], 1e-9), TRIAL_BYTES / max(best[1], 1e-9))
