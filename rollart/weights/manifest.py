"""What a version of the weights consists of: shards, cut into buckets, each with a checksum.

A version has one shard for each rank of the trainer. A shard is one run of bytes: the pieces of tensors that its rank
holds, one after the other, each at a multiple of `ALIGN`. Buckets are cuts of that run, all of `bucket_bytes` but the
last, independent of tensors. A piece is `count` elements of a tensor from element `start` on, in flat order, so ranks
that hold rows of a tensor hold one piece of it each.

Needs only the standard library and msgspec, as do its imports.
"""

from collections.abc import Iterable, Mapping
from math import prod

import msgspec
from msgspec import Struct

ALIGN = 64
BUCKETS = 8
MIN_BUCKET, MAX_BUCKET = 4 << 20, 64 << 20
ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class TensorPart(Struct, frozen=True, gc=False):
    """What a rank holds of a tensor: `dtype` as torch names it, `shape` that of the whole tensor."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int

    @property
    def whole(self) -> bool:
        return self.count == prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


class ShardPiece(Struct, frozen=True, gc=False):
    """A part and its byte offset in the shard."""

    part: TensorPart
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.part.bytes


class Manifest(Struct, frozen=True):
    """One shard of a version. `id` is that of the publication: a version published again after a rollback has another.
    `base` is the id of an earlier publication with the same pieces, for deltas. `aliases` are the other names of tied
    tensors."""

    version: int
    id: str
    shard: int
    shards: int
    size: int
    bucket_bytes: int
    pieces: tuple[ShardPiece, ...]
    aliases: Mapping[str, str] = {}
    base: str | None = None

    @property
    def buckets(self) -> int:
        return -(-self.size // self.bucket_bytes)

    def bounds(self, bucket: int) -> tuple[int, int]:
        """The bytes of the shard that are in a bucket."""
        start = bucket * self.bucket_bytes
        return start, min(self.size, start + self.bucket_bytes)

    def same_layout(self, other: "Manifest") -> bool:
        return (self.pieces, self.bucket_bytes, self.shards) == (other.pieces, other.bucket_bytes, other.shards)

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> "Manifest":
        return msgspec.json.decode(data, type=cls)


def lay_out(parts: Iterable[TensorPart]) -> tuple[tuple[ShardPiece, ...], int]:
    """The offset of each part, and the total size."""
    pieces, offset = [], 0
    for part in parts:
        pieces.append(ShardPiece(part, offset))
        offset += -(-part.bytes // ALIGN) * ALIGN
    return tuple(pieces), offset


def bucket_size(size: int) -> int:
    """For a shard of `size` bytes: enough buckets for several streams and early readers, few enough that the cost per
    bucket does not matter.

    >>> [bucket_size(size << 20) >> 20 for size in (1, 100, 4000)]
    [4, 13, 64]
    """
    whole = -(-size // (BUCKETS << 20)) << 20
    return min(max(whole, MIN_BUCKET), MAX_BUCKET)
