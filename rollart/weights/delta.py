"""A bucket told as what has changed against the same bucket of an earlier version: absolute values, lossless.

The bytes of an element are looked at by their place in it: a small update changes the low bytes of most numbers and the
high bytes of few. Each of these planes is told, chunk by chunk, in the shortest way: not at all if nothing changed,
whole if most of it did, else the changed bytes, with their places as a bitmap or as offsets in blocks of 256. What is
told overwrites what is there, so a delta on the wrong base gives wrong bytes; the checksum of the result travels along
and says so. Chunks are small enough to stay in a core's cache, which is most of the speed.

Nothing here needs more than numpy and xxhash. `rollart.weights.delta_cost` says when a delta is worth it.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
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

_HEADER = struct.Struct("<4sBxxxQ8s")
_PLANE = struct.Struct("<BxxxI")
_MAGIC = b"rad1"
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class WrongDelta(RollartError):
    """The bytes are not a delta, or not one against this base."""


class _Way(IntEnum):
    """How a plane of a chunk is told."""

    SAME = 0
    WHOLE = 1
    BITMAP = 2
    OFFSETS = 3


def encode(base: Buffer, new: Buffer, item_bytes: int, checksum: bytes | None = None) -> bytes | None:
    """`new` told against `base`, both of one size; None if that is not shorter than `new` itself. `item_bytes` is the
    size of most elements in it, `checksum` the xxh3_64 of `new` if it is known already."""
    old, made = _flat(base), _flat(new)
    if len(old) != len(made):
        raise ValueError(f"the base has {len(old)} bytes and the new bucket {len(made)}; they must be as long")
    item = item_bytes if len(made) % item_bytes == 0 else 1
    parts = [_HEADER.pack(_MAGIC, item, len(made), checksum or xxhash.xxh3_64_digest(new))]
    length = len(parts[0])
    for cut in _chunks(len(made), item):
        told = _tell(old[cut].view(_WORDS[item]), made[cut].view(_WORDS[item]))
        parts += told
        length += sum(map(len, told))
        if length >= len(made):
            break
    return b"".join(parts) if length < len(made) else None


def decode(delta: Buffer, base: Buffer, into: memoryview) -> bytes:
    """Fill `into`, which must not overlap with `base`. Returns its xxh3_64, which is the one that the delta asks for.
    Raises WrongDelta, with `into` in no particular state."""
    told, old, out = _flat(delta), _flat(base), np.frombuffer(into, np.uint8)
    reader = _Reader(told)
    try:
        magic, item, size, checksum = _HEADER.unpack(reader.take(_HEADER.size).data)
        if magic != _MAGIC or item not in _WORDS or not size == len(old) == len(out):
            raise ValueError(f"it is no delta of a bucket of {len(out)} bytes against one of {len(old)}")
        for cut in _chunks(size, item):
            out[cut] = old[cut]
            for place in range(item):
                _overwrite(out[cut][place::item], reader)
        reader.end()
    except (ValueError, IndexError) as error:
        raise WrongDelta(f"a delta of {len(told)} bytes cannot be used: {error}") from error
    made: bytes = xxhash.xxh3_64_digest(out.data)
    if made != checksum:
        raise WrongDelta("a delta did not give the bucket that it was made for: it was damaged, or the base is another")
    return made


def changed_shares(base: Buffer, new: Buffer, item_bytes: int) -> tuple[float, list[float]]:
    """The share of elements that differ, and that of their bytes by place, the low one first."""
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
    """What a plane of so many elements takes, if so many of them changed."""
    return min(*_sizes(items, changed), items) if changed else 0


def _flat(buffer: Buffer) -> Bytes:
    return np.frombuffer(buffer, np.uint8)


def _chunks(size: int, item: int) -> Iterator[slice]:
    step = CHUNK * item
    return (slice(at, min(at + step, size)) for at in range(0, size, step))


def _plane(words: Words, place: int) -> Bytes:
    """The bytes at one place of every element. A cast is several times faster than a strided view."""
    return (words >> words.dtype.type(8 * place) if place else words).astype(np.uint8)


def _sizes(items: int, changed: float) -> tuple[float, float]:
    """With a bitmap, and with offsets."""
    return -(-items // 8) + changed, -(-items // BLOCK) + 2 * changed


def _tell(old: Words, made: Words) -> list[bytes]:
    parts: list[bytes] = []
    changes = old ^ made
    for place in range(made.itemsize):
        parts += _tell_plane(_plane(changes, place) != 0, _plane(made, place))
    return parts


def _tell_plane(changed: NDArray[np.bool_], plane: Bytes) -> list[bytes]:
    items, count = len(plane), int(np.count_nonzero(changed))
    if count == 0:
        return [_PLANE.pack(_Way.SAME, 0)]
    bitmap, offsets = _sizes(items, count)
    if items <= min(bitmap, offsets):
        return [_PLANE.pack(_Way.WHOLE, items), plane.tobytes()]
    at = np.flatnonzero(changed)
    values = plane[at].tobytes()
    if offsets < bitmap:
        counts = np.bincount(at // BLOCK, minlength=-(-items // BLOCK))
        if counts.max() < BLOCK:
            places = (counts.astype(np.uint8).tobytes(), at.astype(np.uint8).tobytes())
            return [_PLANE.pack(_Way.OFFSETS, count), *places, values]
    return [_PLANE.pack(_Way.BITMAP, count), np.packbits(changed).tobytes(), values]


def _overwrite(plane: Bytes, told: "_Reader") -> None:
    way, count = _PLANE.unpack(told.take(_PLANE.size).data)
    match _Way(way):
        case _Way.SAME:
            pass
        case _Way.WHOLE:
            plane[:] = told.take(len(plane))
        case _Way.BITMAP:
            bits = np.unpackbits(told.take(-(-len(plane) // 8)), count=len(plane))
            plane[np.flatnonzero(bits.view(np.bool_))] = told.take(count)
        case _Way.OFFSETS:
            counts = told.take(-(-len(plane) // BLOCK))
            at = np.repeat(np.arange(len(counts)) * BLOCK, counts) + told.take(count)
            plane[at] = told.take(count)


class _Reader:
    """Takes one piece of a delta after the other. Raises ValueError where it does not end as it should."""

    def __init__(self, told: Bytes) -> None:
        self._told, self._at = told, 0

    def take(self, count: int) -> Bytes:
        piece = self._told[self._at : self._at + count]
        if len(piece) < count:
            raise ValueError(f"it ends {count - len(piece)} bytes too soon")
        self._at += count
        return piece

    def end(self) -> None:
        if self._at != len(self._told):
            raise ValueError(f"{len(self._told) - self._at} bytes are left over")
