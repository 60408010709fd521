"""Reads versions: from the shared memory of this host, after fetching them there if needed.

Needs only the standard library, torch, xxhash and msgspec, so that other programs can use it.

Invariants: a shard that another process of this host is fetching is waited for, and fetched by this one if that one
dies; what this process fetches, it serves to others for as long as it lives.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rollart.core.errors import RollartError
from rollart.core.types import Hop, Publication
from rollart.weights.loaded_version import LoadedVersion
from rollart.weights.replica import STREAMS, Replica
from rollart.weights.server import LOOPBACK, WeightServer
from rollart.weights.store import BeingWritten, MissingVersion, Shard, Store

PATIENCE_S = 60.0
TAKEOVERS = 3
POLL_S = 0.005
SHARED_MEMORY = "shared memory"


class WeightReader:
    """`root` is the folder of the store on this host. `bind` is the address at which this process serves what it
    fetched. `patience` is the timeout for the next bucket."""

    def __init__(
        self, root: Path, *, bind: str = LOOPBACK, streams: int = STREAMS, patience: float = PATIENCE_S
    ) -> None:
        self.store, self.patience = Store(root), patience
        self._bind, self._streams = bind, streams
        self._servers: dict[str | None, WeightServer] = {}
        self._lock = threading.Lock()

    def fetch(self, publication: Publication) -> LoadedVersion:
        """A whole version, checked. Raises RollartError; then nothing is held."""
        for attempt in range(TAKEOVERS):
            download = _Download(self, publication)
            held = download.hold()
            try:
                download.wait()
                held.all()
                held.transport, held.hops, held.relay = download.transport, download.hops, download.relay
                return held
            except MissingVersion as error:
                held.release()
                if (failure := download.failure()) is not None:
                    raise failure from error
                if attempt + 1 == TAKEOVERS:  # else another process was fetching it, and died
                    raise
            except BaseException:
                held.release()
                raise
        raise AssertionError("unreachable")

    def stream(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as they arrive, valid until the iteration ends. Raises RollartError."""
        held = _Download(self, publication).hold()
        try:
            yield from held.arrive()
        finally:
            held.release()

    def replica(self, publication: Publication, shard: int) -> Replica:
        """Fetches a shard, and serves it to others that have the same key."""
        with self._lock:
            if publication.key not in self._servers:
                self._servers[publication.key] = WeightServer(self.store, self._bind, publication.key)
            relay = self._servers[publication.key].url
        return Replica(self.store, publication, shard, relay=relay, streams=self._streams, patience=self.patience)

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self.store.tidy()


class _Download:
    """A version being fetched: one thread for each shard that is not in the store yet."""

    def __init__(self, weights: WeightReader, publication: Publication) -> None:
        self._weights, self._publication = weights, publication
        self._threads: dict[int, threading.Thread] = {}
        self._replicas: dict[int, Replica] = {}
        self._failures: dict[int, RollartError] = {}

    def hold(self) -> LoadedVersion:
        """Returns once all its shards have begun to arrive. Raises RollartError."""
        shards: list[Shard] = []
        try:
            shards.extend(self._shard(number) for number in range(len(self._publication.sources)))
        except BaseException:
            for shard in shards:
                shard.release()
            raise
        own = [number in self._replicas and self._replicas[number].began.is_set() for number in range(len(shards))]
        return LoadedVersion(shards, checked=own, patience=self._weights.patience)

    def wait(self) -> None:
        """Until the fetches of this process have ended; replicas have deadlines of their own."""
        for replica in self._replicas.values():
            replica.over.wait()

    @property
    def transport(self) -> str:
        """How it came; shards may differ."""
        used = {replica.transport for replica in self._replicas.values() if replica.began.is_set()}
        return ", ".join(sorted(used)) or SHARED_MEMORY

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Where the shards that this process fetched came from."""
        whole: dict[str, Hop] = {}
        for each in (hop for replica in self._replicas.values() if replica.began.is_set() for hop in replica.hops):
            known = whole.get(each.source, Hop(each.source, 0, 0.0))
            whole[each.source] = Hop(each.source, known.bytes + each.bytes, max(known.seconds, each.seconds))
        return tuple(whole.values())

    @property
    def relay(self) -> str:
        return next((replica.relay for replica in self._replicas.values() if replica.began.is_set()), "")

    def failure(self) -> RollartError | None:
        """Why a shard that this process was fetching failed."""
        for thread in list(self._threads.values()):
            thread.join(self._weights.patience)
        return next(iter(self._failures.values()), None)

    def _shard(self, number: int) -> Shard:
        version, id = self._publication.version, self._publication.id
        deadline = time.monotonic() + self._weights.patience
        while True:
            try:
                return self._weights.store.open(version, id, number)
            except MissingVersion:
                if number in self._failures:
                    raise self._failures[number] from None
                if time.monotonic() > deadline or not self._publication.sources[number]:
                    raise
            if number not in self._threads:
                self._replicas[number] = self._weights.replica(self._publication, number)
                self._threads[number] = threading.Thread(
                    target=self._fetch_shard, args=(number,), name=f"replica-{number}", daemon=True
                )
                self._threads[number].start()
            self._replicas[number].began.wait(POLL_S)

    def _fetch_shard(self, number: int) -> None:
        try:
            self._replicas[number].run()
        except BeingWritten:
            del self._threads[number]  # another process does; if it dies, this one tries again
        except RollartError as error:
            self._failures[number] = error
