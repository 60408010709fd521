"""Stores with something in them, and processes that write to them or serve them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollart.core.types import Publication
from rollart.weights.manifest import Manifest, TensorPart, lay_out
from rollart.weights.publish import Publisher, TensorShard, new_id
from rollart.weights.server import WeightServer
from rollart.weights.store import Store

BUCKET = 4096
DEADLINE_S = 60.0


def tensors(seed: int, rows: int = 50) -> dict[str, Tensor]:
    """Some 60 kB: many buckets, tensors that cross them, odd sizes, and two that are tied."""
    random = torch.Generator().manual_seed(seed)
    made = {
        "embed": torch.randn(rows, 64, generator=random),
        "odd": torch.randn(7, 3, generator=random),
        "count": torch.arange(5),
        "long": torch.randn(10_000, generator=random),
    }
    return {**made, "head": made["embed"]}


def shares(values: dict[str, Tensor]) -> list[TensorShard]:
    return [TensorShard(name, tuple(tensor.shape), tensor) for name, tensor in values.items()]


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Origin:
    """A publisher with a server, as the trainer has them."""

    def __init__(self, root: Path, key: str | None = None) -> None:
        self.store = Store(root)
        self.server = WeightServer(self.store, key=key)
        self.publisher = Publisher(self.store, bucket_bytes=BUCKET)

    def publish(self, version: int, values: dict[str, Tensor]) -> Publication:
        id = new_id()
        self.publisher.publish(version, id, shares(values))
        return Publication(version, id, ((self.server.url,),))


def blank(size: int, version: int = 1, shard: int = 0, shards: int = 1, id: str = "") -> Manifest:
    """A shard of so many bytes."""
    pieces, size = lay_out([TensorPart("bytes", "uint8", (size,), 0, size)])
    return Manifest(version, id or new_id(), shard, shards, size, BUCKET, pieces)


@contextmanager
def process(code: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `code` with `arguments`, killed at the end if it still runs."""
    lines = "import sys, json; args = json.loads(sys.argv[1]); sys.path.insert(0, args.pop())\n" + code
    given = json.dumps([*arguments, str(Path(__file__).parent)])
    child = subprocess.Popen(
        [sys.executable, "-c", lines, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=DEADLINE_S)


def line(child: subprocess.Popen[str]) -> str:
    """Its next one; the tests' own deadline bounds the wait."""
    assert child.stdout is not None
    reported = child.stdout.readline().strip()
    assert reported, f"the process ended with {child.wait(DEADLINE_S)}"
    return reported
