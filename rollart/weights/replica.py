"""Fetches a shard from another host into the store of this one, where it is read and served to others.

Invariants: the manifest and the checksums come from the publisher, whatever the source of the bytes. A bucket counts
only when its checksum is right; it is retried a few times, and then the shard fails. Buckets arrive in any order, on
several streams, and become readable in order. Only one process of a host fetches a shard.
"""

import contextlib
import threading
import uuid
from urllib.parse import quote

import msgspec
import xxhash

from rollart.core.errors import RollartError
from rollart.core.types import Hop, Publication
from rollart.weights.delta_wire import base_of
from rollart.weights.loaded_version import CorruptWeights
from rollart.weights.manifest import Manifest
from rollart.weights.server import WAIT_S, JoinReply
from rollart.weights.store import SUM_BYTES, ShardWriter, Store
from rollart.weights.transports import Receiver, TransferFailed
from rollart.weights.transports.http import HttpReceiver, path_of
from rollart.weights.transports.offers import FallbackReceiver

STREAMS = 4
TRIES = 3  # for bytes with a wrong checksum


class Replica:
    """One shard, fetched by `run`. `relay` is the URL at which this host serves its own store, if it does. Raises
    TransferFailed if no source of the publication speaks HTTP."""

    def __init__(
        self,
        store: Store,
        publication: Publication,
        shard: int,
        *,
        relay: str = "",
        streams: int = STREAMS,
        patience: float = 60.0,
    ) -> None:
        self._store, self._publication, self._shard = store, publication, shard
        self.relay, self._streams, self._patience = relay, streams, patience
        self._member = uuid.uuid4().hex
        self._origin = next((url for url in publication.sources[shard] if url.startswith("http://")), "")
        if not self._origin:
            missing = f"version {publication.version} is not on this host"
            raise TransferFailed(f"{missing}, and its publication names no source")
        self._control = HttpReceiver([self._origin], key=publication.key, deadline=WAIT_S + patience)
        self._path = path_of(publication.version, publication.id, shard)
        self._state = threading.Condition()
        self._sums: list[int] = []
        self._next = 0
        self._done: set[int] = set()
        self._finished = 0
        self._failure: Exception | None = None
        self._receiver: FallbackReceiver | None = None
        self.hops: tuple[Hop, ...] = ()  # known when it is over
        self.began = threading.Event()  # writing: its buckets are checked on arrival
        self.over = threading.Event()  # successfully or not

    @property
    def transport(self) -> str:
        """In use for the buckets."""
        return self._receiver.transport if self._receiver is not None else "http"

    def run(self) -> None:
        """Blocks until the shard is complete. Raises RollartError: BeingWritten if another process is fetching it."""
        try:
            query = f"manifest?member={self._member}&relay={quote(self.relay)}"
            joined = msgspec.json.decode(self._control.ask(self._origin, f"{self._path}/{query}"), type=JoinReply)
            with self._store.create(joined.manifest) as writer:
                self.began.set()
                self._fetch(writer, joined)
        finally:
            self.over.set()
            with contextlib.suppress(TransferFailed):  # then its lease expires
                self._control.ask(self._origin, f"{self._path}/leave?member={self._member}")
            self._control.close()

    def _fetch(self, writer: ShardWriter, joined: JoinReply) -> None:
        base = base_of(self._store, joined.manifest)
        sources = [*joined.sources, self._origin]
        streams = min(self._streams, joined.manifest.buckets)
        plain = HttpReceiver(sources, key=self._publication.key, deadline=self._patience, base=base, streams=streams)
        receiver = self._receiver = FallbackReceiver(joined.offers, plain, self._patience)
        try:
            receiver.start(joined.manifest, writer.data)
            threads = [
                threading.Thread(target=self._stream, args=(writer, receiver), name=f"weights-{number}", daemon=True)
                for number in range(streams)
            ]
            for thread in threads:
                thread.start()
            self._add_sums(joined.sums)
            self._follow(joined.manifest)
            for thread in threads:
                thread.join()
            if self._failure is not None:
                raise self._failure
            receiver.finish()
        finally:
            self.hops = tuple(Hop(source, *received) for source, received in receiver.received.items())
            receiver.close()

    def _follow(self, manifest: Manifest) -> None:
        """Receives the checksums as the publisher computes them."""
        silent = 0.0
        while len(self._sums) < manifest.buckets and self._failure is None:
            query = f"sums?from={len(self._sums)}&member={self._member}"
            try:
                sums = self._control.ask(self._origin, f"{self._path}/{query}")
            except TransferFailed as error:
                self._fail(error)
                return
            silent = 0.0 if sums else silent + WAIT_S
            if silent >= self._patience:
                self._fail(TransferFailed(f"{self._origin} published nothing more within {silent:g} s"))
            self._add_sums(sums)

    def _add_sums(self, data: bytes) -> None:
        sums = [int.from_bytes(data[at : at + SUM_BYTES], "little") for at in range(0, len(data), SUM_BYTES)]
        with self._state:
            self._sums += sums
            self._state.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._failure = self._failure or error
            self._state.notify_all()

    def _stream(self, writer: ShardWriter, receiver: Receiver) -> None:
        try:
            while (bucket := self._take(writer.manifest.buckets)) is not None:
                self._fetch_bucket(writer, receiver, bucket)
                self._arrived(writer, bucket)
        except (RollartError, OSError) as error:
            self._fail(error)

    def _take(self, buckets: int) -> int | None:
        """The next bucket that is final at the publisher."""
        with self._state:
            bucket, self._next = self._next, self._next + 1
            if bucket >= buckets:
                return None
            self._state.wait_for(lambda: self._failure is not None or len(self._sums) > bucket)
            return bucket if self._failure is None else None

    def _fetch_bucket(self, writer: ShardWriter, receiver: Receiver, bucket: int) -> None:
        into = writer.data[slice(*writer.manifest.bounds(bucket))]
        for _ in range(TRIES):
            checksum = receiver.update(bucket, into)
            if checksum is None:
                checksum = xxhash.xxh3_64_intdigest(into)
            if checksum == self._sums[bucket]:
                return
        version = writer.manifest.version
        raise CorruptWeights(f"bucket {bucket} of version {version} came {TRIES} times with a wrong checksum")

    def _arrived(self, writer: ShardWriter, bucket: int) -> None:
        with self._state:
            self._done.add(bucket)
            while self._finished in self._done:
                self._done.remove(self._finished)
                writer.finish(self._sums[self._finished])
                self._finished += 1
