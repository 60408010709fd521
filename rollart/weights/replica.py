"""Brings a shard that was published on another host into the store of this one, where it is read and served on.

Invariants: the manifest and the checksums are those of the publisher, whoever gives the bytes. A bucket counts as there
only when its bytes fit its checksum; it is asked for again a few times, and then the shard is given up. Buckets arrive
in any order, on several streams, and become readable in order. Only one process of a host fetches a shard.
"""

import contextlib
import threading
import uuid
from urllib.parse import quote

import msgspec
import xxhash

from rollart.core.errors import RollartError
from rollart.core.types import Publication
from rollart.weights.delta_wire import DeltaBase
from rollart.weights.loaded_version import CorruptWeights
from rollart.weights.manifest import Manifest
from rollart.weights.server import WAIT_S, JoinReply
from rollart.weights.store import SUM_BYTES, ShardWriter, Store
from rollart.weights.transports import Receiver, TransferFailed
from rollart.weights.transports.http import HttpReceiver, path_of
from rollart.weights.transports.offers import FallbackReceiver

STREAMS = 4
TRIES = 3  # for bytes that do not fit their checksum


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
        self._relay, self._streams, self._patience = relay, streams, patience
        self._member = uuid.uuid4().hex
        self._origin = next((url for url in publication.sources[shard] if url.startswith("http://")), "")
        if not self._origin:
            raise TransferFailed(f"version {publication.version} is not here, and nobody tells where it is")
        self._control = HttpReceiver([self._origin], key=publication.key, deadline=WAIT_S + patience)
        self._path = path_of(publication.version, publication.id, shard)
        self._state = threading.Condition()
        self._sums: list[int] = []
        self._next = 0
        self._done: set[int] = set()
        self._finished = 0
        self._failure: Exception | None = None
        self._incoming: FallbackReceiver | None = None
        self.began = threading.Event()  # to write, so that what is found is checked on its way
        self.over = threading.Event()  # well or not

    @property
    def transport(self) -> str:
        """What brings the buckets."""
        return self._incoming.transport if self._incoming is not None else "http"

    def run(self) -> str:
        """Blocks until the shard is there; tells how it came. Raises RollartError, and BeingWritten if another process
        of this host does it already."""
        try:
            query = f"manifest?member={self._member}&relay={quote(self._relay)}"
            joined = msgspec.json.decode(self._control.ask(self._origin, f"{self._path}/{query}"), type=JoinReply)
            with self._store.create(joined.manifest) as writing:
                self.began.set()
                return self._fetch(writing, joined)
        finally:
            self.over.set()
            self._leave()
            self._control.close()

    def _leave(self) -> None:
        with contextlib.suppress(TransferFailed):  # then its lease ends by itself
            self._control.ask(self._origin, f"{self._path}/leave?member={self._member}")

    def _fetch(self, writing: ShardWriter, joined: JoinReply) -> str:
        base = DeltaBase.of(self._store, joined.manifest)
        sources = [*joined.sources, self._origin]
        streams = min(self._streams, joined.manifest.buckets)
        plain = HttpReceiver(sources, key=self._publication.key, deadline=self._patience, base=base, streams=streams)
        incoming = self._incoming = FallbackReceiver(joined.offers, plain, self._patience)
        try:
            incoming.start(joined.manifest, writing.data)
            threads = [
                threading.Thread(target=self._stream, args=(writing, incoming), name=f"weights-{number}", daemon=True)
                for number in range(streams)
            ]
            for thread in threads:
                thread.start()
            self._learn(joined.sums)
            self._follow(joined.manifest)
            for thread in threads:
                thread.join()
            if self._failure is not None:
                raise self._failure
            incoming.finish()
        finally:
            incoming.close()
        return incoming.transport

    def _follow(self, manifest: Manifest) -> None:
        """Learn the checksums as the publisher makes them."""
        silent = 0.0
        while len(self._sums) < manifest.buckets and self._failure is None:
            query = f"sums?from={len(self._sums)}&member={self._member}"
            try:
                told = self._control.ask(self._origin, f"{self._path}/{query}")
            except TransferFailed as error:
                self._fail(error)
                return
            silent = 0.0 if told else silent + WAIT_S
            if silent >= self._patience:
                self._fail(TransferFailed(f"{self._origin} published nothing more within {silent:g} s"))
            self._learn(told)

    def _learn(self, told: bytes) -> None:
        sums = [int.from_bytes(told[at : at + SUM_BYTES], "little") for at in range(0, len(told), SUM_BYTES)]
        with self._state:
            self._sums += sums
            self._state.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._state:
            self._failure = self._failure or error
            self._state.notify_all()

    def _stream(self, writing: ShardWriter, incoming: Receiver) -> None:
        try:
            while (bucket := self._take(writing.manifest.buckets)) is not None:
                self._bring(writing, incoming, bucket)
                self._arrived(writing, bucket)
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

    def _bring(self, writing: ShardWriter, incoming: Receiver, bucket: int) -> None:
        start, stop = writing.manifest.bounds(bucket)
        into = writing.data[start:stop]
        for _ in range(TRIES):
            checksum = incoming.update(bucket, into)
            if checksum is None:
                checksum = xxhash.xxh3_64_intdigest(into)
            if checksum == self._sums[bucket]:
                return
        raise CorruptWeights(
            f"bucket {bucket} of version {writing.manifest.version} came {TRIES} times with bytes that do not fit "
            "its checksum"
        )

    def _arrived(self, writing: ShardWriter, bucket: int) -> None:
        with self._state:
            self._done.add(bucket)
            while self._finished in self._done:
                self._done.remove(self._finished)
                writing.finish(self._sums[self._finished])
                self._finished += 1
