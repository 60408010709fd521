"""Buckets by NIXL: receivers read them out of the publisher's memory, by RDMA where there is any.

The publisher only registers the memory of a version; the metadata by which NIXL finds it is part of the URL, which
travels with the publication and so is as secret as that. The plugin is UCX, which chooses among RDMA, shared memory and
TCP; `UCX_TLS` and `UCX_NET_DEVICES` narrow the choice. RDMA and GPU memory have not been exercised.

Invariants: a process has one agent, which locks itself, so threads need not. NIXL's own progress thread would keep a
core busy; receivers drive their reads while they wait for them, and a publisher polls every `POLL_S` for reads that
need its help (TCP). A failed read is cancelled before `update` returns, so nothing is written into reused memory.
"""

import base64
import os
import threading
import time
import uuid
from functools import cache
from typing import Any

import msgspec

from rollart.weights.manifest import Manifest
from rollart.weights.transports import Receiver, RegisteredMemory, Sender, TransferFailed, address

SCHEME = "nixl"
INSTALL = "install it with pip install 'rollart[nixl]'"
POLL_S, CANCEL_S = 0.001, 10.0
PUBLISHED, RECEIVED = 3, 2
"""Versions whose memory stays registered: the newest, the one before, and on the publisher's side one being written."""


class NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    """For a reader: the publisher's agent, the address of the shard in its memory, and its size."""

    agent: bytes
    address: int
    size: int

    @property
    def url(self) -> str:
        return f"{SCHEME}:{base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()}"

    @classmethod
    def of(cls, url: str) -> "NixlAddress":
        """Raises TransferFailed."""
        try:
            return msgspec.msgpack.decode(base64.urlsafe_b64decode(url.removeprefix(f"{SCHEME}:")), type=cls)
        except ValueError as error:
            raise TransferFailed(f"this is not the URL of a NIXL publisher: {url[:60]}") from error


class NixlSender(Sender):
    """`url` is that of the last version."""

    def __init__(self) -> None:
        self.url = ""
        self._memory = _registered(PUBLISHED)
        self._closed = threading.Event()
        self._helper = threading.Thread(target=self._help, name="nixl", daemon=True)
        self._helper.start()

    def start(self, manifest: Manifest, data: memoryview) -> None:
        begin = self._memory.use(data)
        self.url = NixlAddress(_agent().get_agent_metadata(), begin, manifest.size).url

    def update(self, bucket: int) -> None:
        """Readers see the memory itself; the checksum says that it is final."""

    def close(self) -> None:
        self._closed.set()
        self._helper.join(CANCEL_S)
        self._memory.clear()

    def _help(self) -> None:
        while not self._closed.wait(POLL_S):
            _agent().get_new_notifs()


class NixlReceiver(Receiver):
    """`deadline` is in seconds, for one bucket."""

    def __init__(self, url: str, *, deadline: float = 30.0) -> None:
        self._source, self._deadline = NixlAddress.of(url), deadline
        self._memory = _memory()
        self._peer = _called(_agent().add_remote_agent, self._source.agent)
        self._manifest: Manifest

    def start(self, manifest: Manifest, data: memoryview) -> None:
        if manifest.size != self._source.size:
            raise TransferFailed(f"the publisher offers {self._source.size} bytes instead of {manifest.size}")
        self._manifest = manifest
        self._memory.use(data)

    def update(self, bucket: int, into: memoryview) -> None:
        agent, start = _agent(), self._manifest.bounds(bucket)[0]
        here = agent.get_xfer_descs([(address(into), into.nbytes, 0)], "DRAM")
        there = agent.get_xfer_descs([(self._source.address + start, into.nbytes, 0)], "DRAM")
        reading = _called(agent.initialize_xfer, "READ", here, there, self._peer)
        try:
            self._wait(bucket, reading)
        finally:
            _cancel(reading)

    def _wait(self, bucket: int, reading: Any) -> None:
        until = time.monotonic() + self._deadline
        state = _called(_agent().transfer, reading)
        while state == "PROC":
            if time.monotonic() > until:
                raise TransferFailed(f"bucket {bucket} did not come by NIXL within {self._deadline:g} s")
            time.sleep(POLL_S)
            state = _called(_agent().check_xfer_state, reading)
        if state != "DONE":
            raise TransferFailed(f"bucket {bucket} did not come by NIXL: the read failed")


def _called(function: Any, *arguments: Any) -> Any:
    """NIXL's errors have no common type."""
    try:
        return function(*arguments)
    except Exception as error:
        raise TransferFailed(f"NIXL: {str(error) or type(error).__name__}") from error


def _cancel(reading: Any) -> None:
    """Returns when nothing is written any more. Raises TransferFailed after `CANCEL_S`."""
    until = time.monotonic() + CANCEL_S
    while True:
        try:
            reading.release()
            return
        except Exception as error:  # NIXL raises its own error while it reads
            if time.monotonic() > until:
                raise TransferFailed("NIXL cannot cancel a read; restart this engine") from error
        time.sleep(POLL_S)


@cache
def _agent() -> Any:
    """Of this process. Raises TransferFailed where NIXL is not installed."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # else it prints to stdout
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise TransferFailed(f"NIXL is not installed ({error}); {INSTALL}") from error
    config = nixl_agent_config(
        enable_prog_thread=False, backends=["UCX"], sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    return nixl_agent(f"rollart-{uuid.uuid4().hex}", config)


def _registered(keep: int) -> RegisteredMemory[Any]:
    agent = _agent()

    def register(begin: int, size: int) -> Any:
        return _called(agent.register_memory, agent.get_reg_descs([(begin, size, 0, "")], "DRAM"))

    return RegisteredMemory(register, agent.deregister_memory, keep)


@cache
def _memory() -> RegisteredMemory[Any]:
    """Shared by all receivers of this process."""
    return _registered(RECEIVED)
