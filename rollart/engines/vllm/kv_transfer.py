"""Prefill here, decode there: what two services tell each other of KV that vLLM's NIXL connector then moves.

The server that prefills keeps the KV and says how it can be had; its service keeps that note under the request's id
until the service of the decoding server asks for it, and hears from it again once the KV is there. Invariants: a note
is only used by a server whose weights have the version that made the KV; KV that nobody asks for within `NOTE_S` is not
given away any more, and the server lets go of it after `LEASE_S`; weights are only swapped once no KV is under way, for
vLLM would stop and wait for it; whatever goes wrong, the decoding server computes the prompt itself.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any

from rollart.core.errors import ServiceError
from rollart.launch import rpc

LEASE_S = 6
NOTE_S = 3.0
RECEIVE_S = 30.0  # from the first question to the last byte, while its server is busy
ANSWER_S = 2.0
ASK: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVOffer:
    """How KV that `version` made can be had; `params` is vLLM's own business."""

    params: dict[str, Any]
    version: int


@dataclass(frozen=True, slots=True)
class KVOfferRequest:
    """The KV of a request, if `version` made it."""

    request_id: str
    version: int


class KVOffers:
    """Of the KV that this server keeps for others, from the beginning of its prefill until it is let go of."""

    def __init__(self) -> None:
        self._notes: dict[str, tuple[float, KVOffer]] = {}
        self._held = PendingTransfers()

    def begin(self, request_id: str, deadline: float) -> None:
        self._held.add(request_id, deadline)

    def keep(self, request_id: str, note: KVOffer | None) -> None:
        """None: there is no KV to be had."""
        if note is None:
            self._held.remove(request_id)
            return
        now = time.monotonic()
        self._notes = {name: kept for name, kept in self._notes.items() if kept[0] > now}
        self._notes[request_id] = now + NOTE_S, note
        self._held.add(request_id, LEASE_S + 1.0)

    async def handed(self, wanted: KVOfferRequest) -> KVOffer | None:
        until, note = self._notes.pop(wanted.request_id, (0.0, None))
        if note is None or note.version != wanted.version or until < time.monotonic():
            return None  # then it is held for as long as the lease goes on
        self._held.add(wanted.request_id, RECEIVE_S)
        return note

    async def received(self, request_id: str) -> None:
        self._held.remove(request_id)

    async def drained(self) -> None:
        await self._held.over()


class PendingTransfers:
    """Names of things that end, each within its time."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._change = asyncio.Event()

    def add(self, name: str, seconds: float) -> None:
        self._until[name] = time.monotonic() + seconds

    def remove(self, name: str) -> None:
        self._until.pop(name, None)
        self._change.set()

    async def over(self) -> None:
        """Once none is left, or all have had their time."""
        while self._until and (left := max(self._until.values()) - time.monotonic()) > 0:
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._change.wait()
        self._until.clear()


class KVPeers:
    """The services of other servers, one connection to each. `key` is what those of this run want to be shown."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._clients: dict[str, rpc.RpcClient] = {}
        self._connecting = asyncio.Lock()

    async def note(self, url: str, request_id: str, version: int) -> dict[str, Any] | None:
        """How the KV of a request can be had from there, if `version` made it."""
        try:
            async with asyncio.timeout(ANSWER_S):
                client = await self._client(url)
                wanted = KVOfferRequest(request_id, version)
                note = await client.call("handed", wanted, returns=KVOffer | None, deadline=ANSWER_S)  # type: ignore[arg-type]
        except (ServiceError, TimeoutError) as error:
            logger.warning("the KV of %s is not to be had from %s: %s", request_id, url, error or "no answer")
            return None
        return note.params if note is not None else None

    async def received(self, url: str, request_id: str) -> None:
        """Tell who kept the KV that it is not needed any more."""
        client = self._clients.get(url)
        if client is not None and client.alive:
            with contextlib.suppress(ServiceError):  # then it finds out by itself, a little later
                await client.call("received", request_id, returns=type(None), deadline=ANSWER_S)

    async def _client(self, url: str) -> rpc.RpcClient:
        async with self._connecting:
            old = self._clients.get(url)
            if old is not None and old.alive:
                return old
            if old is not None:
                await old.close()
            self._clients[url] = await rpc.connect(url, key=self._key, deadline=ANSWER_S)
            return self._clients[url]

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))
