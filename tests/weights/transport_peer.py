"""The other side of a transport: a publisher, or a receiver, as a process that follows commands, line by line.

`python transport_peer.py publisher|receiver SCHEME URL SIZE BUCKET_BYTES`. Each line in is one order, each line out its
answer, in JSON. Bytes are a function of the version, so both sides know what they should be.
"""

import json
import mmap
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from rollart.weights.manifest import Manifest
from rollart.weights.transports import Receiver, Sender, TransferFailed


def manifest_of(version: int, size: int, bucket_bytes: int) -> Manifest:
    return Manifest(version, f"{version:012x}", 0, 1, size, bucket_bytes, ())


def bytes_of(version: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.resize(np.random.default_rng(version).integers(0, 256, 100_003, dtype=np.uint8), size)


class Publisher:
    """Two memories, used in turn, as the store does."""

    def __init__(self, sender: Sender, size: int, bucket_bytes: int) -> None:
        self._sender, self._size, self._bucket_bytes = sender, size, bucket_bytes
        self._memories = [memoryview(mmap.mmap(-1, size)) for _ in range(2)]

    def publish(self, version: int) -> str:
        data = self._memories[version % 2]
        manifest = manifest_of(version, self._size, self._bucket_bytes)
        self._sender.start(manifest, data)
        for bucket in range(manifest.buckets):
            cut = slice(*manifest.bounds(bucket))
            data[cut] = bytes_of(version, self._size)[cut].data
            self._sender.update(bucket)
        self._sender.finish()
        return self._sender.url

    def close(self) -> None:
        self._sender.close()


class Fetcher:
    def __init__(self, make: Callable[[str], Receiver], size: int, bucket_bytes: int) -> None:
        self._make, self._size, self._bucket_bytes = make, size, bucket_bytes
        self._data = memoryview(mmap.mmap(-1, size))

    def fetch(self, url: str, version: int) -> str:
        """The checksum of what came, or why nothing did."""
        manifest = manifest_of(version, self._size, self._bucket_bytes)
        self._data[:] = bytes(self._size)
        try:
            receiver = self._make(url)
            receiver.start(manifest, self._data)
            for bucket in range(manifest.buckets):
                receiver.update(bucket, self._data[slice(*manifest.bounds(bucket))])
            receiver.finish()
            receiver.close()
        except TransferFailed as error:
            return f"failed: {error}"
        return str(xxhash.xxh3_64_hexdigest(self._data))

    def close(self) -> None: ...


def main(role: str, scheme: str, url: str, size: int, bucket_bytes: int) -> None:
    subject: Publisher | Fetcher
    if scheme == "nixl":
        from rollart.weights.transports.nixl import NixlReceiver, NixlSender

        subject = (
            Publisher(NixlSender(), size, bucket_bytes)
            if role == "publisher"
            else Fetcher(lambda at: NixlReceiver(at, deadline=10.0), size, bucket_bytes)
        )
    else:
        from rollart.weights.transports.mooncake import MooncakeReceiver, MooncakeSender

        subject = (
            Publisher(MooncakeSender(url), size, bucket_bytes)
            if role == "publisher"
            else Fetcher(MooncakeReceiver, size, bucket_bytes)
        )
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(subject, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:6]))  # type: ignore[arg-type]
