"""KV transfer between vLLM servers: the messages between their services; vLLM's NIXL connector moves the KV.

The server that prefills keeps the KV and returns the parameters to fetch it; its service keeps that offer under the
request's id until the service of the decoding server takes it, and reports when the KV has arrived. Invariants: an
offer is used only by a server with the version that computed the KV; an offer not taken within `OFFER_S` expires, and
the server frees the KV after `LEASE_S`; weights are swapped only while no transfer is pending, for vLLM would stop and
wait for it; whatever goes wrong, the decoding server computes the prompt itself.
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
OFFER_S = 3.0
RECEIVE_S = 30.0  # from the request to the last byte, while the server is busy
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
    """KV computed with `version`; `params` are opaque, for vLLM."""

    params: dict[str, Any]
    version: int


@dataclass(frozen=True, slots=True)
class KVOfferRequest:
    """For the KV of a request, if `version` computed it."""

    request_id: str
    version: int


class KVOffers:
    """Of the KV that this server keeps for others, from the start of its prefill until it is freed."""

    def __init__(self) -> None:
        self._offers: dict[str, tuple[float, KVOffer]] = {}
        self._held = PendingTransfers()

    def begin(self, request_id: str, deadline: float) -> None:
        self._held.add(request_id, deadline)

    def keep(self, request_id: str, offer: KVOffer | None) -> None:
        """None: there is no KV to offer."""
        if offer is None:
            self._held.remove(request_id)
            return
        now = time.monotonic()
        self._offers = {name: kept for name, kept in self._offers.items() if kept[0] > now}
        self._offers[request_id] = now + OFFER_S, offer
        self._held.add(request_id, LEASE_S + 1.0)

    async def take(self, request: KVOfferRequest) -> KVOffer | None:
        until, offer = self._offers.pop(request.request_id, (0.0, None))
        if offer is None or offer.version != request.version or until < time.monotonic():
            return None  # the server keeps it until its lease ends
        self._held.add(request.request_id, RECEIVE_S)
        return offer

    async def received(self, request_id: str) -> None:
        self._held.remove(request_id)

    async def drained(self) -> None:
        await self._held.over()


class PendingTransfers:
    """Names of transfers, each with a deadline."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._change = asyncio.Event()

    def add(self, name: str, seconds: float) -> None:
        self._until[name] = time.monotonic() + seconds

    def remove(self, name: str) -> None:
        self._until.pop(name, None)
        self._change.set()

    async def over(self) -> None:
        """Returns once none is left or all deadlines have passed."""
        while self._until and (left := max(self._until.values()) - time.monotonic()) > 0:
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._change.wait()
        self._until.clear()


class KVPeers:
    """The services of other servers, one connection to each. `key` is the key of the run's services."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self._clients: dict[str, rpc.RpcClient] = {}
        self._connecting = asyncio.Lock()

    async def take(self, url: str, request_id: str, version: int) -> dict[str, Any] | None:
        """Parameters to fetch the KV of a request from there, if `version` computed it."""
        try:
            async with asyncio.timeout(ANSWER_S):
                client = await self._client(url)
                request = KVOfferRequest(request_id, version)
                offer = await client.call("take_offer", request, returns=KVOffer | None, deadline=ANSWER_S)  # type: ignore[arg-type]
        except (ServiceError, TimeoutError) as error:
            logger.warning("the KV of %s cannot be fetched from %s: %s", request_id, url, error or "no answer")
            return None
        return offer.params if offer is not None else None

    async def received(self, url: str, request_id: str) -> None:
        """The server there can free the KV."""
        client = self._clients.get(url)
        if client is not None and client.alive:
            with contextlib.suppress(ServiceError):  # then its lease ends a little later
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
