"""Buckets by a Mooncake store: the publisher puts them there, and receivers get them.

The store is memory that its clients lend, found through a `mooncake_master`, by TCP or RDMA. The publisher lends enough
for the versions that it keeps there, unless others do; nothing of it outlives the publisher then. The URL names the
master: `mooncake://host:port`, with `?protocol=rdma&devices=mlx5_0` for RDMA, which has not been exercised. Mooncake
binds its ports on all interfaces and checks no key: use it only in private networks.

Invariants: a process has one client per master. A bucket is there once `update` of the publisher has returned; those of
the last `VERSIONS` versions stay, pinned, and older ones are removed. Time-outs of Mooncake's own end what hangs.
"""

import os
import socket
from collections import deque
from functools import cache
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rollart.weights.manifest import Manifest
from rollart.weights.transports import Receiver, RegisteredMemory, Sender, TransferFailed, address

INSTALL = "install it with pip install 'rollart[mooncake]' and, on Debian, apt-get install libibverbs1 libnuma1"
VERSIONS = 2
LOCAL_BUFFER = 16 << 20
NO_METADATA_SERVER = "P2PHANDSHAKE"


class MooncakeSender(Sender):
    """`lent` bytes are what this process adds to the store; None: enough for `VERSIONS` versions like the first."""

    def __init__(self, url: str, *, lent: int | None = None) -> None:
        _library()  # fails before the first version
        self.url, self._lent = url, lent
        self._kept: deque[list[str]] = deque()
        self._store: Any = None
        self._memory: RegisteredMemory[int]
        self._address: int
        self._manifest: Manifest

    def start(self, manifest: Manifest, data: memoryview) -> None:
        if self._store is None:
            # Half a bucket more: the store's allocator leaves holes.
            room = VERSIONS * manifest.size + manifest.bucket_bytes // 2
            self._store = _connected(self.url, self._lent if self._lent is not None else room)
            self._memory = _registered(self._store, VERSIONS + 1)
        self._address = self._memory.use(data)
        self._manifest = manifest
        self._evict(keep=VERSIONS - 1)
        self._kept.append([])

    def update(self, bucket: int) -> None:
        key, (start, stop) = _key(self._manifest, bucket), self._manifest.bounds(bucket)
        code = self._store.put_from(key, self._address + start, stop - start, self._where())
        if code != 0:
            raise TransferFailed(f"the Mooncake store at {self.url} did not take bucket {bucket}: error {code}")
        self._kept[-1].append(key)

    def _where(self) -> Any:
        """Never evicted; in the memory that this process lends, because that of a process that died is taken for
        present for some seconds."""
        where = _library().ReplicateConfig()
        where.with_hard_pin = True
        if self._lent != 0:
            where.preferred_segment = self._store.get_hostname()
        return where

    def close(self) -> None:
        if self._store is not None:
            self._evict(keep=0)
            self._memory.clear()
            self._store.close()
            self._store = None

    def _evict(self, keep: int) -> None:
        while len(self._kept) > keep:
            for key in self._kept.popleft():
                self._store.remove(key, True)


class MooncakeReceiver(Receiver):
    def __init__(self, url: str) -> None:
        self._url = url
        self._store, self._memory = _client(url)
        self._manifest: Manifest

    def start(self, manifest: Manifest, data: memoryview) -> None:
        self._manifest = manifest
        self._memory.use(data)

    def update(self, bucket: int, into: memoryview) -> None:
        got = self._store.get_into(_key(self._manifest, bucket), address(into), into.nbytes)
        if got != into.nbytes:
            raise TransferFailed(
                f"the Mooncake store at {self._url} did not give bucket {bucket} of version {self._manifest.version}: "
                + (f"error {got}" if got < 0 else f"{got} bytes instead of {into.nbytes}")
            )


def _key(manifest: Manifest, bucket: int) -> str:
    return f"rollart-{manifest.id}-{manifest.shard}-{bucket}"


def _connected(url: str, lent: int) -> Any:
    """A client that lends `lent` bytes. Raises TransferFailed."""
    library, master = _library(), urlsplit(url)
    if master.scheme != "mooncake" or master.hostname is None or master.port is None:
        raise TransferFailed(f"{url!r} does not name a Mooncake master; write mooncake://host:port")
    options = {name: values[0] for name, values in parse_qs(master.query).items()}
    store = library.MooncakeDistributedStore()
    code = store.setup(
        _own_address(master.hostname, master.port),
        NO_METADATA_SERVER,
        lent,
        LOCAL_BUFFER,
        options.get("protocol", "tcp"),
        options.get("devices", ""),
        f"{master.hostname}:{master.port}",
    )
    if code != 0:
        raise TransferFailed(f"no Mooncake master answers at {url} (error {code}); start one with mooncake_master")
    return store


def _library() -> Any:
    """Raises TransferFailed where Mooncake is not installed."""
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")  # else it logs every connection
    try:
        from mooncake import store
    except ImportError as error:
        raise TransferFailed(f"Mooncake is not installed ({error}); {INSTALL}") from error
    return store


def _own_address(host: str, port: int) -> str:
    """The address by which machines on the way to `host` know this one; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own: str = probe.getsockname()[0]
        return own


def _registered(store: Any, keep: int) -> RegisteredMemory[int]:
    def register(begin: int, size: int) -> int:
        code = store.register_buffer(begin, size)
        if code != 0:
            raise TransferFailed(f"Mooncake cannot register {size} bytes of memory: error {code}")
        return begin

    return RegisteredMemory(register, store.unregister_buffer, keep)


@cache
def _client(url: str) -> tuple[Any, RegisteredMemory[int]]:
    """Shared by all receivers of this process."""
    store = _connected(url, 0)
    return store, _registered(store, VERSIONS)
