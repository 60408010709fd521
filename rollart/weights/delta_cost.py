"""When a delta arrives before the plain bucket would: predicted per bucket and link, from what was measured.

A bucket takes its bytes over the speed of the link. As a delta it takes fewer bytes, but has to be encoded before and
decoded after. How many bytes is known from a sample of it, how fast the codec is from a trial on this machine.
"""

import threading
import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from rollart.weights.delta import Buffer, changed_shares, decode, encode, plane_bytes

ANCHOR_EVERY = 16
"""One of so many versions has no base and is told in full, so that nobody depends on a long chain of them."""

TRIALS, TRIAL_BYTES, TRIAL_SHARE = 3, 1 << 20, 0.1

_measuring = threading.Lock()
RUNS, RUN = 64, 4096


@dataclass(frozen=True, slots=True)
class Codec:
    """Bytes of a bucket that are encoded, and decoded, in a second."""

    encode: float
    decode: float

    @property
    def seconds_per_byte(self) -> float:
        return 1 / self.encode + 1 / self.decode


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second between two machines, and how fast they encode and decode."""

    bytes_per_s: float
    codec: Codec

    def seconds(self, size: int, delta_bytes: float | None = None) -> float:
        """For a bucket of `size` bytes: plain, or as a delta of so many. The steps of a delta follow one another."""
        if delta_bytes is None:
            return size / self.bytes_per_s
        return size * self.codec.seconds_per_byte + delta_bytes / self.bytes_per_s

    def pays(self, base: Buffer, new: Buffer, item_bytes: int) -> bool:
        """Whether a delta is predicted to be faster. Costs nothing where the link outruns the codec."""
        size = memoryview(new).nbytes
        if self.seconds(size, 0) >= self.seconds(size):
            return False
        return self.seconds(size, predicted_bytes(base, new, item_bytes)) < self.seconds(size)


def predicted_bytes(base: Buffer, new: Buffer, item_bytes: int) -> int:
    """About how long the delta would be, from evenly spread runs of elements: a small part of the work of encoding."""
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
    """Links of fewer bytes a second than this are better served with the delta; 0 if none is."""
    return max(0, size - delta_bytes) / (size * codec.seconds_per_byte)


def measured_codec() -> Codec:
    """This machine's, found once by encoding and decoding a megabyte of which a tenth has changed: the best of some
    trials by CPU time, because others may be using the cores just now."""
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
