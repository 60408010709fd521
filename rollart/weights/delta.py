"""Delta codec: a bucket as its difference to the same bucket of an earlier version; absolute values, lossless.

Bytes are grouped into planes by their position in an element: a small update changes the low bytes of most numbers and
the high bytes of few. Each plane is encoded, chunk by chunk, in the shortest form: nothing if nothing changed, all of
it if most changed, else the changed bytes, with their positions as a bitmap or as offsets in blocks of 256. Decoding
overwrites the base, so a wrong base gives wrong bytes; the checksum of the result travels along and detects it. Chunks
are small enough to stay in a core's cache, which is most of the speed.

A delta has fewer bytes than the bucket, but must be encoded and decoded. `Link` predicts, per bucket and link, whether
it arrives first: its size is predicted from a sample, the speed of the codec measured on this machine.
"""

import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from rollart.core.errors import RollartError

Bytes = NDArray[np.uint8]
Buffer = memoryview | bytes | bytearray
Words = NDArray[np.unsignedinteger[Any]]

CHUNK = 1 << 16
BLOCK = 256
ANCHOR_EVERY = 16  # versions; an anchor has no base and is sent in full, so that chains of deltas stay short
TRIALS, TRIAL_BYTES, TRIAL_SHARE = 3, 1 << 20, 0.1
RUNS, RUN = 64, 4096

_HEADER = struct.Struct("<4sBxxxQ8s")
_PLANE = struct.Struct("<BxxxI")
_MAGIC = b"rad1"
_measuring = threading.Lock()
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class WrongDelta(RollartError):
    """The bytes are not a delta, or not one against this base."""


class _Encoding(IntEnum):
    """Of a plane of a chunk."""

    SAME = 0
    WHOLE = 1
    BITMAP = 2
    OFFSETS = 3


def encode(base: Buffer, new: Buffer, item_bytes: int, checksum: bytes | None = None) -> bytes | None:
    """The delta from `base` to `new`, which have one size; None if it is not shorter than `new`. `item_bytes` is the
    size of most elements, `checksum` the xxh3_64 of `new` if known."""
    old, made = _flat(base), _flat(new)
    if len(old) != len(made):
        raise ValueError(f"the base has {len(old)} bytes and the new bucket {len(made)}; they must have one size")
    item = item_bytes if len(made) % item_bytes == 0 else 1
    parts = [_HEADER.pack(_MAGIC, item, len(made), checksum or xxhash.xxh3_64_digest(new))]
    length = len(parts[0])
    for cut in _chunks(len(made), item):
        words = made[cut].view(_WORDS[item])
        changes = old[cut].view(_WORDS[item]) ^ words
        for place in range(item):
            encoded = _encode_plane(_plane(changes, place) != 0, _plane(words, place))
            parts += encoded
            length += sum(map(len, encoded))
        if length >= len(made):
            break
    return b"".join(parts) if length < len(made) else None


def decode(delta: Buffer, base: Buffer, into: memoryview) -> bytes:
    """Fills `into`, which must not overlap with `base`. Returns its xxh3_64, checked against that of the delta. Raises
    WrongDelta, with `into` in an undefined state."""
    encoded, old, out = _flat(delta), _flat(base), np.frombuffer(into, np.uint8)
    reader = _Reader(encoded)
    try:
        magic, item, size, checksum = _HEADER.unpack(reader.take(_HEADER.size).data)
        if magic != _MAGIC or item not in _WORDS or not size == len(old) == len(out):
            raise ValueError(f"it is not a delta of a bucket of {len(out)} bytes against one of {len(old)}")
        for cut in _chunks(size, item):
            out[cut] = old[cut]
            for place in range(item):
                _overwrite(out[cut][place::item], reader)
        reader.end()
    except (ValueError, IndexError) as error:
        raise WrongDelta(f"a delta of {len(encoded)} bytes cannot be used: {error}") from error
    made: bytes = xxhash.xxh3_64_digest(out.data)
    if made != checksum:
        raise WrongDelta("a delta gave another bucket than it was made for: it is damaged, or the base is wrong")
    return made


def changed_shares(base: Buffer, new: Buffer, item_bytes: int) -> tuple[float, list[float]]:
    """The share of elements that differ, and that of their bytes by position, lowest first."""
    words = _WORDS[item_bytes]
    old, made = _flat(base), _flat(new)
    elements, planes = 0, [0] * item_bytes
    for cut in _chunks(len(made), item_bytes):
        changes = old[cut].view(words) ^ made[cut].view(words)
        elements += int(np.count_nonzero(changes))
        for place in range(item_bytes):
            planes[place] += int(np.count_nonzero(_plane(changes, place)))
    items = max(1, len(made) // item_bytes)
    return elements / items, [count / items for count in planes]


def plane_bytes(items: int, changed: float) -> float:
    """Encoded size of a plane of `items` elements of which `changed` differ."""
    return min(*_sizes(items, changed), items) if changed else 0


def _flat(buffer: Buffer) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def _chunks(size: int, item: int) -> Iterator[slice]:
    step = CHUNK * item
    return (slice(at, min(at + step, size)) for at in range(0, size, step))


def _plane(words: Words, place: int) -> Bytes:
    """The bytes at one position of every element. A cast is several times faster than a strided view."""
    return (words >> words.dtype.type(8 * place) if place else words).astype(np.uint8)


def _sizes(items: int, changed: float) -> tuple[float, float]:
    """As a bitmap, and as offsets."""
    return -(-items // 8) + changed, -(-items // BLOCK) + 2 * changed


def _encode_plane(changed: NDArray[np.bool_], plane: Bytes) -> list[bytes]:
    items, count = len(plane), int(np.count_nonzero(changed))
    if count == 0:
        return [_PLANE.pack(_Encoding.SAME, 0)]
    bitmap, offsets = _sizes(items, count)
    if items <= min(bitmap, offsets):
        return [_PLANE.pack(_Encoding.WHOLE, items), plane.tobytes()]
    at = np.flatnonzero(changed)
    values = plane[at].tobytes()
    if offsets < bitmap:
        counts = np.bincount(at // BLOCK, minlength=-(-items // BLOCK))
        if counts.max() < BLOCK:
            places = (counts.astype(np.uint8).tobytes(), at.astype(np.uint8).tobytes())
            return [_PLANE.pack(_Encoding.OFFSETS, count), *places, values]
    return [_PLANE.pack(_Encoding.BITMAP, count), np.packbits(changed).tobytes(), values]


def _overwrite(plane: Bytes, reader: "_Reader") -> None:
    encoding, count = _PLANE.unpack(reader.take(_PLANE.size).data)
    match _Encoding(encoding):
        case _Encoding.SAME:
            pass
        case _Encoding.WHOLE:
            plane[:] = reader.take(len(plane))
        case _Encoding.BITMAP:
            bits = np.unpackbits(reader.take(-(-len(plane) // 8)), count=len(plane))
            plane[np.flatnonzero(bits.view(np.bool_))] = reader.take(count)
        case _Encoding.OFFSETS:
            counts = reader.take(-(-len(plane) // BLOCK))
            at = np.repeat(np.arange(len(counts)) * BLOCK, counts) + reader.take(count)
            plane[at] = reader.take(count)


class _Reader:
    """Reads a delta piece by piece. Raises ValueError if it is too short or too long."""

    def __init__(self, data: Bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> Bytes:
        piece = self._data[self._at : self._at + count]
        if len(piece) < count:
            raise ValueError(f"it is {count - len(piece)} bytes too short")
        self._at += count
        return piece

    def end(self) -> None:
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes are left over")


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
    old, made = _flat(base), _flat(new)
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
