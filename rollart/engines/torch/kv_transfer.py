"""KV transfer between engines: the messages, the side that serves KV and the side that fetches it.

An engine that lacks the KV of a context asks another one for what follows its own: the first reply has the first part
and a ticket for the rest. A ticket keeps nothing alive: once the entry is evicted or outdated, the rest is gone, and
the other side uses what it got. All of this runs in the event loop, not in the stepping thread.

Invariants of fetching: it is an optimisation, never a failure: whatever goes wrong, what has arrived is used and the
rest is computed here. Of requests for the same KV, as in a group, the first fetches and the others wait for it. There
is one connection to each engine, shared by all fetches, of which `MAX_FETCHES` run at a time. Every wait has a
deadline, which includes the wait for one's turn.
"""

import asyncio
import itertools
import logging
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch
from torch import Tensor

from rollart.core.errors import EngineFailed, ServiceError
from rollart.engines.torch.kv_cache import CacheEntry, FetchedKV, KVCache
from rollart.engines.torch.kv_rows import KVLayout
from rollart.engines.torch.pace import EmulatedLink
from rollart.engines.torch.prefix_cache import chain
from rollart.launch import rpc

PART_BYTES = 2 << 20
ANSWER_S = 2.0
FETCH_S = 10.0
MAX_FETCHES = 4  # from one engine at a time

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KVRequest:
    """The KV of `tokens` from `start` on, computed with exactly `version`, laid out as `layout`."""

    session: str
    tokens: list[int]
    start: int
    version: int
    layout: str


@dataclass(frozen=True, slots=True)
class KVRangeRequest:
    """More of the entry of a ticket."""

    ticket: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class KVPart:
    """`data` is the KV of `count` tokens from `start` on: [tensors, heads, count, dim], in C order. The entry behind
    `ticket` goes on until `held`."""

    ticket: int
    held: int
    start: int
    count: int
    data: memoryview


class KVServer:
    """Serves KV of the cache to other engines."""

    def __init__(self, kv_cache: KVCache, layout: KVLayout) -> None:
        self._kv_cache = kv_cache
        self._layout = layout
        self._step = max(PART_BYTES // layout.token_bytes, 1)
        self._numbers = itertools.count(1)
        self._tickets: WeakValueDictionary[int, CacheEntry] = WeakValueDictionary()

    async def offer(self, request: KVRequest) -> KVPart:
        """A part of no tokens if nothing in the cache helps."""
        entry, held, version = self._kv_cache.find(request.session, request.tokens, chain(request.tokens))
        fits = version == request.version and self._layout.name == request.layout
        if entry is None or held <= request.start or not fits:
            return KVPart(0, request.start, request.start, 0, memoryview(b""))
        ticket = next(self._numbers)
        self._tickets[ticket] = entry
        stop = min(request.start + self._step, held)
        return self._part(ticket, entry, held, request.start, stop)

    async def more(self, request: KVRangeRequest) -> KVPart:
        entry = self._tickets.get(request.ticket)
        if entry is None or not 0 <= request.start < request.stop <= len(entry.tokens):
            raise EngineFailed("the KV is no longer cached")
        stop = min(request.stop, request.start + self._step)
        return self._part(request.ticket, entry, len(entry.tokens), request.start, stop)

    def _part(self, ticket: int, entry: CacheEntry, held: int, start: int, stop: int) -> KVPart:
        return KVPart(ticket, held, start, stop - start, _bytes(entry.kv[:, :, start:stop]))


@torch.inference_mode()
def _bytes(kv: Tensor) -> memoryview:
    """One copy, which also makes it contiguous; numpy knows no bfloat16, so as bytes."""
    raw: np.ndarray[tuple[int], np.dtype[np.uint8]] = kv.contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
    return raw.data


class KVFetcher:
    """`link`, for an emulated device, delays what arrives by the time its link would take. `key` is the key of the
    run's services."""

    def __init__(self, layout: KVLayout, link: EmulatedLink | None = None, key: str | None = None) -> None:
        self._layout = layout
        self._key = key
        self._link = link
        self._peers: dict[str, _Peer] = {}
        self._first: dict[tuple[int, ...], asyncio.Event] = {}

    async def fetch(self, url: str, request: KVRequest, blocks: tuple[int, ...]) -> FetchedKV | None:
        """What has arrived of the KV that the engine at `url` has; None if nothing did, or if another request with the
        same hash chain `blocks` has fetched it meanwhile."""
        if blocks in self._first:
            await self._first[blocks].wait()
            return None
        over = asyncio.Event()
        if blocks:
            self._first[blocks] = over
        try:
            return await self._fetch(url, request)
        finally:
            self._first.pop(blocks, None)
            over.set()

    async def _fetch(self, url: str, request: KVRequest) -> FetchedKV | None:
        began = asyncio.get_running_loop().time()
        peer = self._peers.setdefault(url, _Peer(url, self._key))
        arrived = _Arrived(self._layout, request.start)
        try:
            async with asyncio.timeout(FETCH_S), peer.gate:
                await self._receive(await peer.client(), request, arrived)
        except (ServiceError, msgspec.MsgspecError, TimeoutError) as error:
            logger.warning("KV of %d tokens was not fetched from %s: %s", len(request.tokens), url, error or "too slow")
        part = arrived.part(request.version)
        if part is not None and self._link is not None:
            await self._link.carry(part.stop - part.start, began)
        return part

    async def _receive(self, client: rpc.RpcClient, request: KVRequest, arrived: "_Arrived") -> None:
        part = await client.call("offer", request, returns=KVPart, deadline=ANSWER_S)
        held = min(part.held, len(request.tokens))
        if part.count:
            arrived.add(part, held)
        while arrived.stop < held:
            rest = KVRangeRequest(part.ticket, arrived.stop, held)
            arrived.add(await client.call("more", rest, returns=KVPart, deadline=ANSWER_S), held)

    async def close(self) -> None:
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(peer.close() for peer in peers.values()))


@dataclass(slots=True)
class _Peer:
    """Another engine and the connection to it, which concurrent callers share."""

    url: str
    key: str | None
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FETCHES))
    connection: asyncio.Task[rpc.RpcClient] | None = None

    async def client(self) -> rpc.RpcClient:
        old = self.connection
        if old is None or (old.done() and not _alive(old)):
            self.connection = asyncio.create_task(self._connect(old))
        assert self.connection is not None
        return await asyncio.shield(self.connection)

    async def _connect(self, old: asyncio.Task[rpc.RpcClient] | None) -> rpc.RpcClient:
        await _end(old)
        return await rpc.connect(self.url, key=self.key, deadline=ANSWER_S)

    async def close(self) -> None:
        await _end(self.connection)


def _alive(connection: asyncio.Task[rpc.RpcClient]) -> bool:
    return not connection.cancelled() and connection.exception() is None and connection.result().alive


async def _end(connection: asyncio.Task[rpc.RpcClient] | None) -> None:
    if connection is not None:
        connection.cancel()
        for made in await asyncio.gather(connection, return_exceptions=True):
            if isinstance(made, rpc.RpcClient):
                await made.close()


class _Arrived:
    """KV from `start` on, without a gap until `stop`."""

    def __init__(self, layout: KVLayout, start: int) -> None:
        self.start = self.stop = start
        self._layout = layout
        self._kv = torch.empty(0)

    def add(self, part: KVPart, held: int) -> None:
        """`held` is the end of all that will come; the first part allocates memory for it."""
        layout, stop = self._layout, part.start + part.count
        if (
            part.start != self.stop
            or part.count < 1
            or stop > held
            or len(part.data) != part.count * layout.token_bytes
        ):
            raise ServiceError("the reply does not fit the request")
        if self.stop == self.start:
            self._kv = torch.empty((layout.tensors, layout.heads, held - self.start, layout.dim), dtype=layout.dtype)
        raw = np.frombuffer(part.data, np.uint8).reshape(layout.tensors, layout.heads, part.count, -1)
        self._kv.view(torch.uint8).numpy()[:, :, self.stop - self.start : stop - self.start] = raw
        self.stop = stop

    def part(self, version: int) -> FetchedKV | None:
        if self.stop == self.start:
            return None
        count = self.stop - self.start
        kv = self._kv if self._kv.shape[2] == count else self._kv[:, :, :count].clone()
        return FetchedKV(version, self.start, kv.to(self._layout.device))
