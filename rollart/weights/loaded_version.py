"""A version in this process: its shards, checked bucket by bucket, and their tensors.

A tensor is a view of a shard's memory if the shard has all of it, else a copy assembled from its pieces. Tensors are
read-only, and valid until `release`.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

import torch
import xxhash
from torch import Tensor

from rollart.core.errors import RollartError
from rollart.core.types import Hop
from rollart.weights.manifest import ITEM_BYTES, Manifest, ShardPiece
from rollart.weights.store import Shard

CHECKS = 3  # of a bucket whose checksum is wrong

with warnings.catch_warnings():  # the memory is mapped read-only on purpose, and torch says so only once
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class CorruptWeights(RollartError):
    """Bytes that differ from what was published."""


class LoadedVersion:
    """`checked` says for each shard whether its buckets were checked on arrival. `transport` is how they came, `hops`
    where from, and `relay` the URL at which this process serves those that it fetched."""

    def __init__(self, shards: Sequence[Shard], *, checked: Sequence[bool], patience: float) -> None:
        self.shards, self.transport, self.relay = shards, "", ""
        self.hops: tuple[Hop, ...] = ()
        self.version = shards[0].manifest.version
        self.tensors: dict[str, Tensor] = {}
        self._checked, self._patience = checked, patience
        self._released = False

    @property
    def bytes(self) -> int:
        return sum(shard.manifest.size for shard in self.shards)

    def arrive(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors as they come, each once its bytes are there and checked. Raises MissingVersion, CorruptWeights."""
        pending = _PendingTensors([shard.manifest for shard in self.shards])
        aliases: dict[str, list[str]] = defaultdict(list)
        for alias, owner in self.shards[0].manifest.aliases.items():
            aliases[owner].append(alias)
        for bucket in range(max(shard.manifest.buckets for shard in self.shards)):
            for number, shard in enumerate(self.shards):
                if bucket >= shard.manifest.buckets:
                    continue
                self._check(shard, bucket, self._checked[number])
                for name in pending.completed(number, shard.manifest.bounds(bucket)[1]):
                    tensor = self._tensor(pending.pieces[name])
                    for known in (name, *aliases[name]):
                        self.tensors[known] = tensor
                        yield known, tensor

    def all(self) -> dict[str, Tensor]:
        """Every tensor by every name."""
        for _ in self.arrive():
            pass
        return self.tensors

    def release(self) -> None:
        """The memory may then be used for other versions."""
        if not self._released:
            self._released = True
            self.tensors = {}
            for shard in self.shards:
                shard.release()

    def _check(self, shard: Shard, bucket: int, checked: bool) -> None:
        expected = shard.sum(bucket, self._patience)
        start, stop = shard.manifest.bounds(bucket)
        for _ in range(0 if checked else CHECKS):
            if xxhash.xxh3_64_intdigest(shard.data[start:stop]) == expected:
                return
        if not checked:
            raise CorruptWeights(
                f"bucket {bucket} of shard {shard.manifest.shard} of version {self.version} has a wrong checksum; "
                "its memory is damaged, or another program wrote to it"
            )

    def _tensor(self, pieces: Sequence[tuple[int, ShardPiece]]) -> Tensor:
        part = pieces[0][1].part
        if part.whole:
            return self._view(*pieces[0]).view(part.shape)
        whole = torch.empty(prod(part.shape), dtype=getattr(torch, part.dtype))
        for number, piece in pieces:
            whole[piece.part.start : piece.part.start + piece.part.count] = self._view(number, piece)
        return whole.view(part.shape)

    def _view(self, number: int, piece: ShardPiece) -> Tensor:
        dtype = getattr(torch, piece.part.dtype)
        return torch.frombuffer(self.shards[number].data, dtype=dtype, count=piece.part.count, offset=piece.offset)


class _PendingTensors:
    """Which tensors are complete, as the shards fill up from the start."""

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self.pieces: dict[str, list[tuple[int, ShardPiece]]] = defaultdict(list)
        self._order: list[list[ShardPiece]] = [list(reversed(manifest.pieces)) for manifest in manifests]
        for number, manifest in enumerate(manifests):
            for piece in manifest.pieces:
                self.pieces[piece.part.tensor].append((number, piece))
        self._missing = {
            name: prod(parts[0][1].part.shape) * ITEM_BYTES[parts[0][1].part.dtype]
            for name, parts in self.pieces.items()
        }

    def completed(self, number: int, until: int) -> Iterator[str]:
        """Names of the tensors that are complete once shard `number` has its bytes before `until`."""
        left = self._order[number]
        while left and left[-1].end <= until:
            part = left.pop().part
            self._missing[part.tensor] -= part.bytes
            if not self._missing[part.tensor]:
                yield part.tensor
