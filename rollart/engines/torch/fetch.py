"""KV from other engines: the side that lacks it.

Invariants: fetching is an optimisation, never a failure: whatever goes wrong, what has arrived until then is used and
the rest is computed here. Of those who want the same, as the members of a group do, the first fetches and the others
wait: then it is here. A connection to another engine is made once and shared by all that fetch from it, of whom only
`TOGETHER` do at a time, so that what is under way has a bound. Every wait has a deadline, which includes the wait for
one's turn.
"""

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from rollart.core.errors import ServiceError
from rollart.engines.torch.kv_cache import Part
from rollart.engines.torch.kv_rows import Layout
from rollart.engines.torch.kv_transfer import KVPart, KVRange, KVWanted
from rollart.engines.torch.pace import Link
from rollart.launch import rpc

ANSWER_S = 2.0
FETCH_S = 10.0
TOGETHER = 4

logger = logging.getLogger(__name__)


class Fetcher:
    """`link`, for an emulated device, holds up what arrives for as long as its link would. `key` is what the engines of
    this run want to be shown."""

    def __init__(self, layout: Layout, link: Link | None = None, key: str | None = None) -> None:
        self._layout = layout
        self._key = key
        self._link = link
        self._peers: dict[str, _Peer] = {}
        self._first: dict[tuple[int, ...], asyncio.Event] = {}

    async def fetch(self, url: str, wanted: KVWanted, blocks: tuple[int, ...]) -> Part | None:
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

    async def _fetch(self, url: str, wanted: KVWanted) -> Part | None:
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

    async def _receive(self, client: rpc.RpcClient, wanted: KVWanted, arrived: "_Arrived") -> None:
        part = await client.call("offer", wanted, returns=KVPart, deadline=ANSWER_S)
        held = min(part.held, len(wanted.tokens))
        if part.count:
            arrived.add(part, held)
        while arrived.stop < held:
            rest = KVRange(part.ticket, arrived.stop, held)
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

    def __init__(self, layout: Layout, start: int) -> None:
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

    def part(self, version: int) -> Part | None:
        if self.stop == self.start:
            return None
        kv = (
            self._kv
            if self._kv.shape[2] == self.stop - self.start
            else self._kv[:, :, : self.stop - self.start].clone()
        )
        return Part(version, self.start, kv.to(self._layout.device))
