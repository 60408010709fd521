"""Versions for who needs them: from this host's memory if they are there, else brought there first.

Works with the standard library, torch, xxhash and msgspec alone, so that it can be used inside other programs.

Invariants: a shard that another process of this host is bringing here is waited for, and brought by this one if that
one dies; what this process brings, it serves on to others for as long as it lives.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rollart.core.errors import RollartError
from rollart.core.types import Publication
from rollart.weights.loaded_version import LoadedVersion
from rollart.weights.replica import STREAMS, Replica
from rollart.weights.server import LOOPBACK, WeightServer
from rollart.weights.store import BeingWritten, MissingVersion, Shard, Store

PATIENCE_S = 60.0
TAKEOVERS = 3
LOOK_AGAIN_S = 0.005
SHARED_MEMORY = "shared memory"


class WeightReader:
    """`root` is the folder of the store on this host. `bind` is the address at which others of the run may fetch what
    this process brought here. `patience` is how long the next bucket may take to appear."""

    def __init__(
        self,
        root: Path,
        *,
        bind: str = LOOPBACK,
        streams: int = STREAMS,
        patience: float = PATIENCE_S,
    ) -> None:
        self.store = Store(root)
        self._bind, self._streams, self._patience = bind, streams, patience
        self._servers: dict[str | None, WeightServer] = {}
        self._lock = threading.Lock()

    def fetch(self, publication: Publication) -> LoadedVersion:
        """All of a version, checked. Raises RollartError: then nothing is held."""
        for attempt in range(TAKEOVERS):
            coming = _Coming(self, publication)
            held = coming.hold()
            try:
                coming.wait()
                held.all()
                held.transport = coming.transport
                return held
            except MissingVersion as error:
                held.release()
                if (failure := coming.failure(self._patience)) is not None:
                    raise failure from error
                if attempt + 1 == TAKEOVERS:  # else another process was bringing it here, and died
                    raise
            except BaseException:
                held.release()
                raise
        raise AssertionError("unreachable")

    def stream(self, publication: Publication) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors as they arrive, all of them good until the iteration ends. Raises RollartError."""
        held = _Coming(self, publication).hold()
        try:
            yield from held.arrive()
        finally:
            held.release()

    def replica(self, publication: Publication, shard: int) -> Replica:
        """What brings a shard here. Others that show the same key may have it from here."""
        with self._lock:
            if publication.key not in self._servers:
                self._servers[publication.key] = WeightServer(self.store, self._bind, publication.key)
            relay = self._servers[publication.key].url
        return Replica(self.store, publication, shard, relay=relay, streams=self._streams, patience=self._patience)

    @property
    def patience(self) -> float:
        return self._patience

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
        self.store.tidy()


class _Coming:
    """A version on its way here: each shard that is not here yet is brought by a thread."""

    def __init__(self, weights: WeightReader, publication: Publication) -> None:
        self._weights, self._publication = weights, publication
        self._threads: dict[int, threading.Thread] = {}
        self._replicas: dict[int, Replica] = {}
        self._failures: dict[int, RollartError] = {}

    def hold(self) -> LoadedVersion:
        """As soon as all its shards have begun to come. Raises RollartError."""
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
        """Until what this process brings has come, or not: replicas keep deadlines of their own."""
        for replica in self._replicas.values():
            replica.over.wait()

    @property
    def transport(self) -> str:
        """What brought it; shards may differ."""
        brought = {replica.transport for replica in self._replicas.values() if replica.began.is_set()}
        return ", ".join(sorted(brought)) or SHARED_MEMORY

    def failure(self, patience: float) -> RollartError | None:
        """Why a shard that this process was bringing did not come."""
        for thread in list(self._threads.values()):
            thread.join(patience)
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
                thread = threading.Thread(target=self._bring, args=(number,), name=f"replica-{number}", daemon=True)
                self._threads[number] = thread
                thread.start()
            self._replicas[number].began.wait(LOOK_AGAIN_S)

    def _bring(self, number: int) -> None:
        try:
            self._replicas[number].run()
        except BeingWritten:
            del self._threads[number]  # another process does; should it die, we shall see
        except RollartError as error:
            self._failures[number] = error
