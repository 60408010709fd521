"""Serves a store over HTTP: the publisher's to all, an engine's to the engines below it in the tree.

`GET /{version}-{id}.{shard}/...`, with the run's key as bearer token:
- `manifest?member=...&relay=...` joins the tree of the shard; returns the sources of buckets and the checksums so far;
- `sums?from=n` returns the checksums of buckets n and later, as soon as there is one;
- `data` with `Range: bytes=a-b` returns bytes once they are final; or the delta of a bucket, to a receiver that names
  a base that it has;
- `leave?member=...`: the member is done.

Replicas relay buckets in a tree, so that a publisher serves each bucket only a few times: in order of joining, the
first `fan_out` fetch from the publisher, each of them serves the next `fan_out`, and so on. A replica that loses its
parent goes to the grandparent, and at last to the publisher.

Invariants: a connection has no thread before its first request has shown the key; at most `MAX_CALLERS` are that far,
for `KEY_S`, and at most `MAX_CONNECTIONS` further. Nothing is served before it is final. A shard with members is
held, so that its memory is not reused for another version, until they leave or send no heartbeat for `LEASE_S`. A
request waits for at most `WAIT_S`; clients retry.
"""

import contextlib
import hmac
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from rollart.weights.delta_wire import BASE, DELTA, ENCODING, SPEED, DeltaCache
from rollart.weights.manifest import Manifest
from rollart.weights.store import STEM, MissingVersion, Shard, Store

WAIT_S = 5.0
LEASE_S = 60.0
IDLE_S = 120.0
KEY_S, MAX_CALLERS, MAX_CONNECTIONS, HEAD_BYTES = 10.0, 64, 1024, 8192
PARTIAL_S = 0.05  # until the rest of a head is looked for
LOOPBACK = "127.0.0.1"
NO_KEY = "the key of this run is missing or wrong"
REFUSAL = f"HTTP/1.1 401 Unauthorized\r\nConnection: close\r\nContent-Length: {len(NO_KEY)}\r\n\r\n{NO_KEY}".encode()
OFFERS = 4
FAN_OUT = 2
LOCAL_RTT_US = 200
IN_FLIGHT = 256 << 10
MIN_RTT_AT = 148  # in the kernel's struct tcp_info


class JoinReply(msgspec.Struct, frozen=True):
    """`sources` serve by HTTP; `offers` are URLs of other transports. `sums` are the checksums of the final buckets."""

    manifest: Manifest
    sources: tuple[str, ...]
    sums: bytes
    offers: tuple[str, ...] = ()


def ancestors(position: int, fan_out: int = FAN_OUT) -> list[int]:
    """Ancestors of replica number `position`, nearest first, without the publisher.

    >>> ancestors(1), ancestors(2), ancestors(7)
    ([], [0], [2, 0])
    """
    above = []
    while position >= fan_out:
        position = position // fan_out - 1
        above.append(position)
    return above


class FanOut:
    """Of one shard of one publication. Replicas that cannot serve, and so have no URL, are leaves."""

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self._relays: list[str] = []
        self._fan_out = fan_out

    def join(self, relay: str) -> Sequence[str]:
        """The URLs to fetch buckets from, in this order, before the publisher's own."""
        if relay and relay not in self._relays:
            self._relays.append(relay)
        position = self._relays.index(relay) if relay else len(self._relays)
        return [self._relays[index] for index in ancestors(position, self._fan_out)]


@dataclass(slots=True)
class _Lease:
    """Of the members that fetch a shard; `seen` is the time of each one's last heartbeat."""

    shard: Shard
    fan_out: FanOut = field(default_factory=FanOut)
    seen: dict[str, float] = field(default_factory=dict)


class WeightServer:
    """Serves `store` in its own threads until `close`. `served` counts the bytes."""

    def __init__(self, store: Store, bind: str = LOOPBACK, key: str | None = None) -> None:
        self.store, self.key, self.served = store, key, 0
        self.deltas = DeltaCache(store)
        self._leases: dict[tuple[int, str, int], _Lease] = {}
        self._offers: dict[tuple[int, str, int], tuple[str, ...]] = {}
        self._lock = threading.Lock()
        self._server = _Listener((bind, 0), self)
        self.url = f"http://{bind}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="weights", daemon=True)
        self._thread.start()

    def admits(self, shown: bytes) -> bool:
        """Whether this `Authorization` is the key."""
        return self.key is None or hmac.compare_digest(shown, f"Bearer {self.key}".encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            for lease in self._leases.values():
                lease.shard.release()
            self._leases.clear()

    def join(self, name: tuple[int, str, int], member: str, relay: str) -> JoinReply:
        with self._lock:
            if name not in self._leases:
                self._leases[name] = _Lease(self.store.open(*name))
            lease = self._leases[name]
            lease.seen[member] = time.monotonic()
            shard, sources = lease.shard, tuple(lease.fan_out.join(relay))
            return JoinReply(shard.manifest, sources, shard.sums(0), self._offers.get(name, ()))

    def offer(self, manifest: Manifest, urls: tuple[str, ...]) -> None:
        """To members that join from now on; kept for the last `OFFERS` shards."""
        with self._lock:
            self._offers[manifest.version, manifest.id, manifest.shard] = urls
            for name in list(self._offers)[:-OFFERS]:
                del self._offers[name]

    def heartbeat(self, name: tuple[int, str, int], member: str) -> None:
        with self._lock:
            if name in self._leases and member in self._leases[name].seen:
                self._leases[name].seen[member] = time.monotonic()

    def count(self, size: int) -> None:
        with self._lock:
            self.served += size

    def leave(self, name: tuple[int, str, int], member: str) -> None:
        with self._lock:
            if name in self._leases:
                self._leases[name].seen.pop(member, None)
        self.expire()

    def expire(self) -> None:
        """Releases shards that no member fetches any more."""
        now = time.monotonic()
        with self._lock:
            for name, lease in list(self._leases.items()):
                lease.seen = {member: at for member, at in lease.seen.items() if now - at < LEASE_S}
                if not lease.seen:
                    lease.shard.release()
                    del self._leases[name]


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: WeightServer) -> None:
        self.owner = owner
        self._connections: set[Any] = set()
        self._callers: dict[socket.socket, tuple[Any, float]] = {}  # address and deadline, the oldest first
        self._selector = selectors.DefaultSelector()
        self._stopping, self._stopped = threading.Event(), threading.Event()
        super().__init__(address, _Handler)

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        self._selector.register(self, selectors.EVENT_READ)
        while not self._stopping.is_set():
            # A head that came in part is looked at again later: its first part would wake us all the time.
            partial = [caller for caller in self._callers if caller not in self._selector.get_map()]
            ready = {key.fileobj for key, _ in self._selector.select(PARTIAL_S if partial else poll_interval)}
            for caller in [*partial, *(each for each in self._callers if each in ready)]:
                self._unregister(caller)
                self._look_at(caller)
            if self in ready:
                self._accept()
            self.service_actions()
        for caller in list(self._callers):
            self._drop(caller)
        self._selector.close()
        self._stopped.set()

    def shutdown(self) -> None:
        self._stopping.set()
        self._stopped.wait(KEY_S)

    def _accept(self) -> None:
        try:
            caller, address = self.get_request()
        except OSError:  # it is gone already, or too many files are open
            return
        while len(self._callers) >= MAX_CALLERS:
            self._drop(next(iter(self._callers)))
        self._callers[caller] = (address, time.monotonic() + KEY_S)
        self._selector.register(caller, selectors.EVENT_READ)

    def _look_at(self, caller: socket.socket) -> None:
        """Not read, only looked at: its thread reads the request."""
        try:
            head = caller.recv(HEAD_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            head = b""
        address, _ = self._callers[caller]
        if not head or (b"\r\n\r\n" not in head and len(head) == HEAD_BYTES):
            self._drop(caller)
        elif b"\r\n\r\n" in head:
            if not self.owner.admits(_authorization(head)):
                with contextlib.suppress(OSError):
                    caller.send(REFUSAL, socket.MSG_DONTWAIT)
                self._drop(caller)
            elif len(self._connections) >= MAX_CONNECTIONS:
                self._drop(caller)
            else:
                del self._callers[caller]
                self._connections.add(caller)
                self.process_request(caller, address)

    def _unregister(self, caller: socket.socket) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(caller)

    def _drop(self, caller: socket.socket) -> None:
        self._unregister(caller)
        self._callers.pop(caller, None)
        caller.close()

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Closes kept connections too, so that no client goes on with a closed server."""
        super().server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # already closed
                connection.shutdown(socket.SHUT_RDWR)

    def service_actions(self) -> None:
        now = time.monotonic()
        for caller in [each for each, (_, deadline) in self._callers.items() if deadline < now]:
            self._drop(caller)
        self.owner.expire()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True
    server: _Listener

    def setup(self) -> None:
        super().setup()
        # More than a local link holds at several GB/s, and small enough for both sides' caches.
        if _round_trip_us(self.connection) < LOCAL_RTT_US:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, IN_FLIGHT)

    def do_GET(self) -> None:
        owner = self.server.owner
        if not owner.admits(self.headers.get("Authorization", "").encode()):
            return self._refuse(HTTPStatus.UNAUTHORIZED, NO_KEY)
        url = urlsplit(self.path)
        _, _, rest = url.path.partition("/")
        stem, _, what = rest.partition("/")
        match = STEM.fullmatch(stem)
        if match is None or what not in ("manifest", "sums", "data", "leave"):
            return self._refuse(HTTPStatus.NOT_FOUND, f"there is no {self.path}")
        name = int(match[1]), match[2], int(match[3])
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        try:
            getattr(self, f"_{what}")(name, query)
        except MissingVersion as error:
            self._refuse(HTTPStatus.NOT_FOUND, str(error))
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            self.close_connection = True  # the client is gone

    def _manifest(self, name: tuple[int, str, int], query: dict[str, str]) -> None:
        joined = self.server.owner.join(name, query.get("member", ""), query.get("relay", ""))
        self._reply(msgspec.json.encode(joined))

    def _leave(self, name: tuple[int, str, int], query: dict[str, str]) -> None:
        self.server.owner.leave(name, query.get("member", ""))
        self._reply(b"")

    def _sums(self, name: tuple[int, str, int], query: dict[str, str]) -> None:
        self.server.owner.heartbeat(name, query.get("member", ""))
        first = int(query.get("from", 0))
        shard = self.server.owner.store.open(*name)
        try:
            self._reply(shard.sums(first) if shard.wait(first, WAIT_S) else b"")
        finally:
            shard.release()

    def _data(self, name: tuple[int, str, int], query: dict[str, str]) -> None:
        shard = self._opened(name)
        try:
            start, stop = self._range(shard.manifest.size)
            if not 0 <= start < stop <= shard.manifest.size:
                return self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"it has {shard.manifest.size} bytes")
            if not shard.wait((stop - 1) // shard.manifest.bucket_bytes, WAIT_S):
                return self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "these bytes are not final yet")
            base, speed = self.headers.get(BASE), int(self.headers.get(SPEED, 0))
            delta = self.server.owner.deltas.answer(shard, start, stop, base, speed)
            if delta is not None:
                self.server.owner.count(len(delta))
                return self._reply(delta, {ENCODING: DELTA})
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Length", str(stop - start))
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{shard.manifest.size}")
            self.end_headers()
            self.wfile.flush()
            self.server.owner.count(stop - start)
            # Faster than sendfile, whose packets of single pages cost the receiver twice the time.
            self.connection.sendall(shard.data[start:stop])
        finally:
            shard.release()

    def _opened(self, name: tuple[int, str, int]) -> Shard:
        """Waits: a relay may be asked for what it is about to have."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                return self.server.owner.store.open(*name)
            except MissingVersion:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def _range(self, size: int) -> tuple[int, int]:
        asked = self.headers.get("Range", f"bytes=0-{size - 1}").removeprefix("bytes=")
        first, _, last = asked.partition("-")
        return int(first), int(last) + 1 if last else size

    def _reply(self, body: bytes, headers: Mapping[str, str] | None = None, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        self._reply(message.encode(), status=status)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


def _authorization(head: bytes) -> bytes:
    fields = (line.partition(b":") for line in head.split(b"\r\n\r\n")[0].split(b"\r\n")[1:])
    return next((value.strip() for name, _, value in fields if name.strip().lower() == b"authorization"), b"")


def _round_trip_us(connection: socket.socket) -> int:
    """The minimum that the kernel has measured; a large one if unknown."""
    info = b""
    if hasattr(socket, "TCP_INFO"):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, MIN_RTT_AT + 4)
    return int(struct.unpack_from("I", info, MIN_RTT_AT)[0]) if len(info) >= MIN_RTT_AT + 4 else 1_000_000
