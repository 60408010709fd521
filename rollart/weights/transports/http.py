"""Buckets by HTTP range requests, from relays first and from the publisher at last.

Invariants: what came before a connection was cut is kept, and only the rest is requested, from the same source or the
next. A source that fails `STRIKES` times, or sent bytes with a wrong checksum, is tried last from then on. A bucket
fails after `ATTEMPTS` requests without a byte of progress. Connections are kept between versions: a new one costs both
sides a thread or a handshake. A connection has one owner from `take` to `give`, between two requests; one on which
anything has arrived since, such as its end, is not reused.
"""

import http.client
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import xxhash

from rollart.weights.delta import WrongDelta, decode
from rollart.weights.delta_wire import DELTA, ENCODING, delta_request, speeds
from rollart.weights.manifest import Manifest
from rollart.weights.store import Shard
from rollart.weights.transports import Received, TransferFailed

STRIKES = 2
ATTEMPTS = 8
AGAIN_S = 0.05
CHUNK = 256 << 10  # of a bucket, so that it is still in the cache when its checksum is computed
KEPT = 16


class Connections:
    """Idle connections of this process, at most `KEPT`."""

    def __init__(self) -> None:
        self._idle: deque[tuple[str, http.client.HTTPConnection]] = deque()
        self._lock = threading.Lock()

    def take(self, source: str, deadline: float) -> http.client.HTTPConnection:
        """To the server at the URL `source`; `deadline` is the timeout of each read and write."""
        while (kept := self._kept(source)) is not None:
            if _quiet(kept):
                kept.timeout = deadline
                kept.sock.settimeout(deadline)
                return kept
            kept.close()
        host = urlsplit(source)
        return http.client.HTTPConnection(host.hostname or "", host.port, timeout=deadline)

    def give(self, source: str, connection: http.client.HTTPConnection) -> None:
        if connection.sock is None:
            return
        with self._lock:
            self._idle.append((source, connection))
            surplus = self._idle.popleft()[1] if len(self._idle) > KEPT else None
        if surplus is not None:
            surplus.close()

    def _kept(self, source: str) -> http.client.HTTPConnection | None:
        with self._lock:
            for one in self._idle:
                if one[0] == source:
                    self._idle.remove(one)
                    return one[1]
        return None


def _quiet(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.sock.settimeout(0)
        connection.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


connections = Connections()


class HttpReceiver:
    """`sources` in order of preference, the publisher last. `base` is for deltas, released at the end. `streams` is the
    number of threads that call `update`."""

    def __init__(
        self,
        sources: Sequence[str],
        *,
        key: str | None = None,
        deadline: float = 30.0,
        base: Shard | None = None,
        streams: int = 1,
    ) -> None:
        self._base = self._held = base
        self._sources, self._deadline, self._streams = tuple(dict.fromkeys(sources)), deadline, streams
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._strikes: Counter[str] = Counter()
        self._senders: dict[int, set[str]] = {}
        self._local = threading.local()
        self._taken: list[tuple[str, http.client.HTTPConnection]] = []
        self._path = ""
        self._manifest: Manifest
        self.received = Received()

    def start(self, manifest: Manifest, data: memoryview) -> None:
        self._manifest = manifest
        self._path = path_of(manifest.version, manifest.id, manifest.shard)
        self._senders.clear()
        self.received.restart()

    def update(self, bucket: int, into: memoryview) -> int:
        for blamed in self._senders.pop(bucket, ()):  # requested again: what it sent was wrong
            self._strikes[blamed] += STRIKES
        senders: set[str] = set()
        checksum = xxhash.xxh3_64()
        have, failures, reason = 0, 0, ""
        while have < len(into):
            if failures == ATTEMPTS:
                raise TransferFailed(f"bucket {bucket} did not come: {reason}")
            source = self._best(failures)
            try:
                got = self._read(source, bucket, into, have, checksum)
            except (OSError, http.client.HTTPException, _Refused) as error:
                self._drop(source)
                reason = f"{source}: {str(error) or type(error).__name__}"
                got = 0
            if got:
                self.received.add(source, got)
                senders.add(source)
                have += got
            if have < len(into):
                self._strikes[source] += 1
                failures = 0 if got else failures + 1
                time.sleep(AGAIN_S * failures)
        self._senders[bucket] = senders
        return checksum.intdigest()

    def finish(self) -> None:
        self._senders.clear()

    def close(self) -> None:
        """Call when no thread is in a call any more."""
        while self._taken:
            connections.give(*self._taken.pop())
        if self._held is not None:
            self._held.release()
            self._held = self._base = None

    def ask(self, url: str, what: str) -> bytes:
        """The body of a small reply. Raises TransferFailed."""
        try:
            connection = self._connection(url)
            connection.request("GET", what, headers=self._headers)
            with connection.getresponse() as response:
                body = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._drop(url)
            raise TransferFailed(f"{url}: {str(error) or type(error).__name__}") from error
        if response.status != 200:
            raise TransferFailed(f"{url}: {body.decode(errors='replace')}")
        return body

    def _best(self, failures: int) -> str:
        """The first source below `STRIKES`; when all have failed, each in turn."""
        good = [source for source in self._sources if self._strikes[source] < STRIKES]
        return good[0] if good else self._sources[-1 - failures % len(self._sources)]

    def _read(self, source: str, bucket: int, into: memoryview, have: int, checksum: xxhash.xxh3_64) -> int:
        """Returns the number of bytes that came before the end, or before the connection was cut. The checksum is
        computed while they are still in the cache."""
        start, stop = self._manifest.bounds(bucket)
        connection = self._connection(source)
        asked = {"Range": f"bytes={start + have}-{stop - 1}"}
        base = self._base if have == 0 else None
        if base is not None:
            asked |= delta_request(base, source, self._streams)
        connection.request("GET", f"{self._path}/data", headers=self._headers | asked)
        response = connection.getresponse()
        began = time.monotonic()
        if base is not None and response.headers.get(ENCODING) == DELTA:
            delta = response.read()
            speeds.record(source, len(delta), time.monotonic() - began)
            return self._decoded(base, delta, bucket, into, checksum)
        if response.status != 206:
            raise _Refused(response.read().decode(errors="replace"))
        got = have
        try:
            for count in _pieces(connection.sock, response, into[have:], self._deadline):
                checksum.update(into[got : got + count])
                got += count
        except (OSError, http.client.HTTPException):
            pass  # what has come counts; the caller requests the rest
        response.close()
        if got < len(into):
            self._drop(source)
        speeds.record(source, got - have, time.monotonic() - began)
        return got - have

    def _decoded(self, base: Shard, delta: bytes, bucket: int, into: memoryview, checksum: xxhash.xxh3_64) -> int:
        try:
            decode(delta, base.data[slice(*base.manifest.bounds(bucket))], into)
        except WrongDelta as error:
            self._base = None  # plain from now on; released at the end all the same
            raise _Refused(str(error)) from error
        checksum.update(into)
        return len(into)

    def _connection(self, source: str) -> http.client.HTTPConnection:
        """One per thread and source."""
        known: dict[str, http.client.HTTPConnection] = self._local.__dict__
        if source not in known:
            known[source] = connections.take(source, self._deadline)
            self._taken.append((source, known[source]))
        return known[source]

    def _drop(self, source: str) -> None:
        connection = self._local.__dict__.pop(source, None)
        if connection is not None:
            self._taken.remove((source, connection))
            connection.close()


def _pieces(
    connection: socket.socket, response: http.client.HTTPResponse, into: memoryview, deadline: float
) -> Iterator[int]:
    """Fills `into`, piece by piece: with what came with the headers, then straight from the socket. The timeout is the
    kernel's: with Python's, a read would be two calls and return whatever has come."""
    early = response.fp.peek()[: len(into)]
    into[: len(early)] = response.fp.read(len(early))
    yield len(early)
    got, seconds = len(early), int(deadline)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, int(deadline % 1 * 1e6)))
    while got < len(into):
        count = connection.recv_into(into[got : got + CHUNK], 0, socket.MSG_WAITALL)
        if not count:
            return
        got += count
        yield count
    connection.settimeout(deadline)


class _Refused(Exception):
    """A response other than the requested bytes."""


def path_of(version: int, id: str, shard: int) -> str:
    return f"/{version:08d}-{id}.{shard}"
