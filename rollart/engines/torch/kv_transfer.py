"""KV for other engines: what is said on the wire, and the side that keeps it.

An engine that lacks the KV of a context asks another one for what follows its own: the first answer has the first
part and a ticket for the rest. A ticket keeps nothing alive: once the entry is evicted or outdated, there is no more of
it, and the other side makes do with what it got. All of this runs in the event loop, beside the stepping thread.
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


@dataclass(frozen=True, slots=True)
class KVRequest:
    """The KV of `tokens` from `start` on, made by exactly `version`, laid out as `layout`."""

    session: str
    tokens: list[int]
    start: int
    version: int
    layout: str


@dataclass(frozen=True, slots=True)
class KVRangeRequest:
    """More of what a ticket stands for."""

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
    """Answers other engines from the kv_cache KV."""

    def __init__(self, kv_cache: KVCache, layout: KVLayout) -> None:
        self._kv_cache = kv_cache
        self._layout = layout
        self._step = max(PART_BYTES // layout.token_bytes, 1)
        self._numbers = itertools.count(1)
        self._tickets: WeakValueDictionary[int, CacheEntry] = WeakValueDictionary()

    async def offer(self, wanted: KVRequest) -> KVPart:
        """A part of no tokens if nothing kept here helps."""
        entry, held, version = self._kv_cache.find(wanted.session, wanted.tokens, chain(wanted.tokens))
        fits = version == wanted.version and self._layout.name == wanted.layout
        if entry is None or held <= wanted.start or not fits:
            return KVPart(0, wanted.start, wanted.start, 0, memoryview(b""))
        ticket = next(self._numbers)
        self._tickets[ticket] = entry
        stop = min(wanted.start + self._step, held)
        return self._part(ticket, entry, held, wanted.start, stop)

    async def more(self, wanted: KVRangeRequest) -> KVPart:
        entry = self._tickets.get(wanted.ticket)
        if entry is None or not 0 <= wanted.start < wanted.stop <= len(entry.tokens):
            raise EngineFailed("the KV is no longer kept here")
        stop = min(wanted.stop, wanted.start + self._step)
        return self._part(wanted.ticket, entry, len(entry.tokens), wanted.start, stop)

    def _part(self, ticket: int, entry: CacheEntry, held: int, start: int, stop: int) -> KVPart:
        return KVPart(ticket, held, start, stop - start, _bytes(entry.kv[:, :, start:stop]))


@torch.inference_mode()
def _bytes(kv: Tensor) -> memoryview:
    """One copy, which also makes it contiguous; numpy knows no bfloat16, so as bytes."""
    raw: np.ndarray[tuple[int], np.dtype[np.uint8]] = kv.contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
    return raw.data


ANSWER_S = 2.0
FETCH_S = 10.0
TOGETHER = 4

logger = logging.getLogger(__name__)


class KVFetcher:
    """`link`, for an emulated device, holds up what arrives for as long as its link would. `key` is what the engines of
    this run want to be shown."""

    def __init__(self, layout: KVLayout, link: EmulatedLink | None = None, key: str | None = None) -> None:
        self._layout = layout
        self._key = key
        self._link = link
        self._peers: dict[str, _Peer] = {}
        self._first: dict[tuple[int, ...], asyncio.Event] = {}

    async def fetch(self, url: str, wanted: KVRequest, blocks: tuple[int, ...]) -> FetchedKV | None:
        """What the engine at `url` keeps of what is wanted, as far as it came; None if nothing did, or if another
        request, whose tokens have the same chain of `blocks`, has it by now."""
        if blocks in self._first:
            await self._first[blocks].wait()
            return None
        over = asyncio.Event()
        if blocks:
            self._first[blocks] = over
        try:
            return await self._fetch(url, wanted)
        finally:
            self._first.pop(blocks, None)
            over.set()

    async def _fetch(self, url: str, wanted: KVRequest) -> FetchedKV | None:
        began = asyncio.get_running_loop().time()
        peer = self._peers.setdefault(url, _Peer(url, self._key))
        arrived = _Arrived(self._layout, wanted.start)
        try:
            async with asyncio.timeout(FETCH_S), peer.gate:
                await self._receive(await peer.client(), wanted, arrived)
        except (ServiceError, msgspec.MsgspecError, TimeoutError) as error:
            logger.warning("KV of %d tokens was not fetched from %s: %s", len(wanted.tokens), url, error or "too slow")
        part = arrived.part(wanted.version)
        if part is not None and self._link is not None:
            await self._link.carry(part.stop - part.start, began)
        return part

    async def _receive(self, client: rpc.RpcClient, wanted: KVRequest, arrived: "_Arrived") -> None:
        part = await client.call("offer", wanted, returns=KVPart, deadline=ANSWER_S)
        held = min(part.held, len(wanted.tokens))
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
    """Another engine, and the connection to it. Those who come while it is being made wait for the same one."""

    url: str
    key: str | None
    gate: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOGETHER))
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
        """`held` is where all that will come ends; memory is taken for it once, with the first part."""
        layout, stop = self._layout, part.start + part.count
        if (
            part.start != self.stop
            or part.count < 1
            or stop > held
            or len(part.data) != part.count * layout.token_bytes
        ):
            raise ServiceError("the answer does not fit the question")
        if self.stop == self.start:
            self._kv = torch.empty((layout.tensors, layout.heads, held - self.start, layout.dim), dtype=layout.dtype)
        raw = np.frombuffer(part.data, np.uint8).reshape(layout.tensors, layout.heads, part.count, -1)
        self._kv.view(torch.uint8).numpy()[:, :, self.stop - self.start : stop - self.start] = raw
        self.stop = stop

    def part(self, version: int) -> FetchedKV | None:
        if self.stop == self.start:
            return None
        kv = (
            self._kv
            if self._kv.shape[2] == self.stop - self.start
            else self._kv[:, :, : self.stop - self.start].clone()
        )
        return FetchedKV(version, self.start, kv.to(self._layout.device))
