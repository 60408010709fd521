"""Transports of buckets between hosts.

On one host a version is read where it was written, in shared memory. Between hosts the manifest and the checksums come
from the publisher's HTTP server (`rollart.weights.server`); the buckets come by the transport that the source's
URL names, and are checked on arrival against those checksums. The phases are those of vLLM's weight transfer: init (the
constructor), start, update, finish.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np

from rollart.core.errors import RollartError
from rollart.weights.manifest import Manifest

T = TypeVar("T")


class TransferFailed(RollartError):
    """A bucket did not come; it may be retried, with this source or another."""


class Received:
    """By source, the bytes that came and the seconds from the start until the last of them. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        self._began, self._sources = time.monotonic(), dict[str, tuple[int, float]]()

    def add(self, source: str, size: int) -> None:
        with self._lock:
            self._sources[source] = self._sources.get(source, (0, 0.0))[0] + size, time.monotonic() - self._began

    def items(self) -> list[tuple[str, tuple[int, float]]]:
        with self._lock:
            return list(self._sources.items())


class Sender(Protocol):
    """The publisher's side. All calls come from the publisher's thread. `url` is sent to every engine as a source of
    this shard. HTTP, which serves the store, needs no sender."""

    url: str

    def start(self, manifest: Manifest, data: memoryview) -> None:
        """A version begins. `data` is the shard's memory, `manifest.size` bytes; it is reused for later versions, so
        keep its registration. It is unchanged until a later `start` with the same memory."""
        ...

    def update(self, bucket: int) -> None:
        """The bytes `manifest.bounds(bucket)` of `data` are final. Buckets come in order."""
        ...

    def finish(self) -> None:
        """All buckets are final."""
        return

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's side. `update` is called from several threads at once, each with another bucket, and only for final
    buckets, whose checksum the publisher has sent."""

    def start(self, manifest: Manifest, data: memoryview) -> None:
        """A version begins. `data` is its destination, `manifest.size` bytes of memory that is reused later."""
        ...

    def update(self, bucket: int, into: memoryview) -> int | None:
        """Fills `into`, which is `data[slice(*manifest.bounds(bucket))]`; returns its checksum if it was computed on
        the way. Blocks, with its own deadline. Raises TransferFailed. The caller retries if the checksum is wrong."""
        ...

    def finish(self) -> None:
        return

    def close(self) -> None:
        return


def receiver(url: str, deadline: float) -> Receiver:
    """For an offered URL, by its scheme. Raises TransferFailed."""
    scheme = url.partition(":")[0]
    if scheme == "nixl":
        from rollart.weights.transports.nixl import NixlReceiver

        return NixlReceiver(url, deadline=deadline)
    if scheme == "mooncake":
        from rollart.weights.transports.mooncake import MooncakeReceiver

        return MooncakeReceiver(url)
    raise TransferFailed(f"there is no transport for {url}")


def sender(transport: str) -> Sender:
    """By its name in the run file. Raises TransferFailed."""
    if transport == "nixl":
        from rollart.weights.transports.nixl import NixlSender

        return NixlSender()
    if transport.startswith("mooncake:"):
        from rollart.weights.transports.mooncake import MooncakeSender

        return MooncakeSender(transport)
    raise TransferFailed(f"there is no transport {transport!r} for weights; choose http, nixl or mooncake://host:port")


class RegisteredMemory(Generic[T]):
    """An LRU cache of the memory that a transport has registered with its hardware. Memory is kept alive while it is
    registered, so an address always means the same bytes."""

    def __init__(self, register: Callable[[int, int], T], release: Callable[[T], None], keep: int) -> None:
        self._register, self._release, self._keep = register, release, keep
        self._known: OrderedDict[tuple[int, int], tuple[memoryview, T]] = OrderedDict()

    def use(self, data: memoryview) -> int:
        """Registers `data`; returns its address."""
        key = address(data), data.nbytes
        if key not in self._known:
            self._known[key] = data, self._register(*key)
        self._known.move_to_end(key)
        while len(self._known) > self._keep:
            self._release(self._known.popitem(last=False)[1][1])
        return key[0]

    def clear(self) -> None:
        while self._known:
            self._release(self._known.popitem()[1][1])


def address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
