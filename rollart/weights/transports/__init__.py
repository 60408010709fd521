"""How buckets get from where a version was published to where it is wanted.

On one host a version is read where it was written, in shared memory, and nothing here is needed. Between hosts the
manifest and the checksums always come from the publisher's HTTP server (`rollart.weights.server`), which is the
authority on both; the buckets come by the transport that the source's URL names, and are checked on arrival against
those checksums. The phases are those of vLLM's weight transfer: init (the constructor), start, update, finish.
"""

from typing import Protocol

from rollart.core.errors import RollartError
from rollart.weights.manifest import Manifest


class TransferFailed(RollartError):
    """A bucket did not come; it may be asked for again, here or elsewhere."""


class Sender(Protocol):
    """The publisher's side. All calls come from the publisher's thread. `url` is where receivers find it; it is told to
    every engine as a source of this shard.

    A sender that needs no hand (HTTP, which serves what is in the store) is just a URL and not one of these.
    """

    url: str

    def start(self, manifest: Manifest, data: memoryview) -> None:
        """A version begins. `data` is the shard's memory, `manifest.size` bytes: the same memory comes back for later
        versions, so whatever is registered for it can be kept. It stays unchanged until a later `start` is called with
        the same memory."""
        ...

    def update(self, bucket: int) -> None:
        """The bytes `manifest.bounds(bucket)` of `data` are final. Buckets come in order."""
        ...

    def finish(self) -> None:
        """All buckets are there."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's side. `update` is called from several threads at once, each with a bucket of its own, and only for
    buckets whose checksum the publisher has told, which are final there."""

    def start(self, manifest: Manifest, data: memoryview) -> None:
        """A version begins. `data` is where it goes, `manifest.size` bytes of memory that comes back later."""
        ...

    def update(self, bucket: int, into: memoryview) -> int | None:
        """Fill `into`, which is `data[slice(*manifest.bounds(bucket))]`, and give its checksum if that was computed on
        the way. Blocks, with a deadline of its own. Raises TransferFailed. The caller asks again, which may be
        elsewhere, when the checksum is wrong."""
        ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


def receiver(url: str, deadline: float) -> Receiver:
    """Of what a publisher offers, by the scheme of its URL. Raises TransferFailed."""
    scheme = url.partition(":")[0]
    if scheme == "nixl":
        from rollart.weights.transports.nixl import NixlReceiver

        return NixlReceiver(url, deadline=deadline)
    if scheme == "mooncake":
        from rollart.weights.transports.mooncake import MooncakeReceiver

        return MooncakeReceiver(url)
    raise TransferFailed(f"there is no transport for {url}")


def sender(transport: str) -> Sender:
    """By its name in the run file. Raises TransferFailed with a sentence about what is missing."""
    if transport == "nixl":
        from rollart.weights.transports.nixl import NixlSender

        return NixlSender()
    if transport.startswith("mooncake:"):
        from rollart.weights.transports.mooncake import MooncakeSender

        return MooncakeSender(transport)
    raise TransferFailed(f"there is no transport {transport!r} for weights; choose http, nixl or mooncake://host:port")
