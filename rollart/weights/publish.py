"""Writes one shard of a version into the store, bucket by bucket, straight from the trainer's tensors.

There is no second copy: elements are cast and copied to where readers find them, and the checksum follows a few hundred
kilobytes behind, while they are still in the CPU cache. Tensors on a GPU are copied into the same memory, a bucket at a
time; that has not been exercised.
"""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from rollart.core.types import Publication
from rollart.weights.delta import ANCHOR_EVERY
from rollart.weights.manifest import ALIGN, ITEM_BYTES, Manifest, TensorPart, bucket_size, lay_out
from rollart.weights.store import Shard, ShardWriter, Store
from rollart.weights.transports import Sender

CHUNK = 256 << 10


@dataclass(frozen=True, slots=True)
class TensorShard:
    """What a rank holds of a tensor of `shape`: the elements of `values`, in its flat order from `start` on."""

    name: str
    shape: tuple[int, ...]
    values: Tensor
    start: int = 0


class Publisher:
    """Publishes the shard of one rank. Floating-point tensors are cast to `dtype`, if given. `bucket_bytes` defaults to
    what suits the size of the shard. `digests` are those of the last version: by tensor, the first element of each
    piece in the shard and a hash of its bytes."""

    def __init__(
        self,
        store: Store,
        *,
        shard: int = 0,
        shards: int = 1,
        dtype: str | None = None,
        bucket_bytes: int | None = None,
        senders: Sequence[Sender] = (),
    ) -> None:
        if bucket_bytes is not None and bucket_bytes % ALIGN:
            raise ValueError(f"a bucket's size must be a multiple of {ALIGN} bytes")
        self.store = store
        self._shard, self._shards, self._dtype = shard, shards, dtype
        self._bucket_bytes, self._senders = bucket_bytes, senders
        self._newest: Shard | None = None  # held, so that it stays readable
        self.digests: dict[str, list[tuple[int, int]]] = {}

    def publish(
        self, version: int, id: str, shares: Iterable[TensorShard], aliases: Mapping[str, str] | None = None
    ) -> Manifest:
        """Blocks until all is written. Tensors that share memory are written once. Raises NoRoom."""
        unique, tied = _untied(shares)
        parts = [self._part(share) for share in unique]
        pieces, size = lay_out(parts)
        bucket = self._bucket_bytes or bucket_size(size)
        manifest = Manifest(
            version=version,
            id=id,
            shard=self._shard,
            shards=self._shards,
            size=size,
            bucket_bytes=bucket,
            pieces=pieces,
            aliases={**(aliases or {}), **tied},
        )
        before = self._newest
        if version % ANCHOR_EVERY and before is not None and before.manifest.same_layout(manifest):
            manifest = msgspec.structs.replace(manifest, base=before.manifest.id)
        with self.store.create(manifest) as writer:
            for sender in self._senders:
                sender.start(manifest, writer.data)
            hashes = _write(writer, [share.values for share in unique], self._senders)
            for sender in self._senders:
                sender.finish()
        self.digests = {}
        for piece, hashed in zip(pieces, hashes, strict=True):
            self.digests.setdefault(piece.part.tensor, []).append((piece.part.start, hashed))
        self._newest = self.store.open(version, id, self._shard)
        if before is not None:
            before.release()
        return manifest

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        if self._newest is not None:
            self._newest.release()

    def _part(self, share: TensorShard) -> TensorPart:
        own = str(share.values.dtype).removeprefix("torch.")
        dtype = self._dtype if self._dtype and share.values.is_floating_point() else own
        return TensorPart(share.name, dtype, share.shape, share.start, share.values.numel())


def _untied(shares: Iterable[TensorShard]) -> tuple[list[TensorShard], dict[str, str]]:
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    unique, tied = [], {}
    for share in shares:
        if not share.values.numel():
            continue
        owner = first.setdefault((share.values.data_ptr(), share.shape), share.name)
        if owner == share.name:
            unique.append(share)
        else:
            tied[share.name] = owner
    return unique, tied


class _Buckets:
    """Computes checksums behind the writer, and finishes each bucket when it is final."""

    def __init__(self, writer: ShardWriter, senders: Sequence[Sender]) -> None:
        self._writing, self._senders = writer, senders
        self._size, self._step = writer.manifest.size, writer.manifest.bucket_bytes
        self._hash, self._at, self._bucket = xxhash.xxh3_64(), 0, 0

    @property
    def limit(self) -> int:
        """The end of the current bucket."""
        return min(self._size, (self._bucket + 1) * self._step)

    def written(self, until: int) -> None:
        """All bytes before `until`, which is at most `limit`, are written."""
        if until < self.limit and until - self._at < CHUNK:
            return
        self._hash.update(self._writing.data[self._at : until])
        self._at = until
        if until == self.limit:
            for sender in self._senders:
                sender.update(self._bucket)
            self._writing.finish(self._hash.intdigest())
            self._hash.reset()
            self._bucket += 1


@torch.no_grad()
def _write(writer: ShardWriter, values: Sequence[Tensor], senders: Sequence[Sender]) -> list[int]:
    """Returns a hash of each piece."""
    data, pieces = writer.data, writer.manifest.pieces
    buckets, hashes = _Buckets(writer, senders), list[int]()
    for index, (piece, tensor) in enumerate(zip(pieces, values, strict=True)):
        end = pieces[index + 1].offset if index + 1 < len(pieces) else writer.manifest.size
        dtype, item, count = getattr(torch, piece.part.dtype), ITEM_BYTES[piece.part.dtype], piece.part.count
        target, source = torch.frombuffer(data, dtype=dtype, count=count, offset=piece.offset), tensor.reshape(-1)
        # Small chunks are still in the cache for the checksum; copies from a device are better few and large.
        chunk = count if source.is_cuda else CHUNK // item
        at, hashed = 0, xxhash.xxh3_64()
        while at < count:
            stop = min(count, at + chunk, (buckets.limit - piece.offset) // item)
            target[at:stop].copy_(source[at:stop])
            hashed.update(data[piece.offset + at * item : piece.offset + stop * item])
            at = stop
            buckets.written(piece.offset + at * item)
        hashes.append(hashed.intdigest())
        if end > piece.end:
            data[piece.end : end] = bytes(end - piece.end)
            buckets.written(end)
    return hashes


def publish(root: Path, version: int, tensors: Mapping[str, Tensor], **options: Any) -> Publication:
    """Publishes whole tensors once; `options` are those of Publisher."""
    id = new_id()
    shares = [TensorShard(name, tuple(tensor.shape), tensor.detach()) for name, tensor in tensors.items()]
    publisher = Publisher(Store(root), **options)
    publisher.publish(version, id, shares)
    publisher.close()
    return Publication(version, id, ((),))


def tensor_digests(shards: Iterable[Mapping[str, Sequence[tuple[int, int]]]]) -> dict[str, str]:
    """Of whole tensors, in order of their names, from the digests of all shards: 8 hexadecimal digits each."""
    pieces: dict[str, list[tuple[int, int]]] = {}
    for shard in shards:
        for tensor, found in shard.items():
            pieces.setdefault(tensor, []).extend(found)
    return {name: f"{xxhash.xxh32_intdigest(repr(sorted(pieces[name])).encode()):08x}" for name in sorted(pieces)}


def new_id() -> str:
    return uuid.uuid4().hex[:12]
