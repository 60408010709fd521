"""KV for other engines: what is said on the wire, and the side that keeps it.

An engine that lacks the KV of a context asks another one for what follows its own: the first answer has the first
part and a ticket for the rest. A ticket keeps nothing alive: once the entry is evicted or outdated, there is no more of
it, and the other side makes do with what it got. All of this runs in the event loop, beside the stepping thread.
"""

import itertools
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from rollart.core.errors import EngineFailed
from rollart.engines.torch.kv_cache import Entry, ParkedKV
from rollart.engines.torch.kv_rows import Layout
from rollart.engines.torch.prefix_cache import chain

PART_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class KVWanted:
    """The KV of `tokens` from `start` on, made by exactly `version`, laid out as `layout`."""

    session: str
    tokens: list[int]
    start: int
    version: int
    layout: str


@dataclass(frozen=True, slots=True)
class KVRange:
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


class Handover:
    """Answers other engines from the parked KV."""

    def __init__(self, parked: ParkedKV, layout: Layout) -> None:
        self._parked = parked
        self._layout = layout
        self._step = max(PART_BYTES // layout.token_bytes, 1)
        self._numbers = itertools.count(1)
        self._tickets: WeakValueDictionary[int, Entry] = WeakValueDictionary()

    async def offer(self, wanted: KVWanted) -> KVPart:
        """A part of no tokens if nothing kept here helps."""
        entry, held, version = self._parked.find(wanted.session, wanted.tokens, chain(wanted.tokens))
        fits = version == wanted.version and self._layout.name == wanted.layout
        if entry is None or held <= wanted.start or not fits:
            return KVPart(0, wanted.start, wanted.start, 0, memoryview(b""))
        ticket = next(self._numbers)
        self._tickets[ticket] = entry
        stop = min(wanted.start + self._step, held)
        return self._part(ticket, entry, held, wanted.start, stop)

    async def more(self, wanted: KVRange) -> KVPart:
        entry = self._tickets.get(wanted.ticket)
        if entry is None or not 0 <= wanted.start < wanted.stop <= len(entry.tokens):
            raise EngineFailed("the KV is no longer kept here")
        stop = min(wanted.stop, wanted.start + self._step)
        return self._part(wanted.ticket, entry, len(entry.tokens), wanted.start, stop)

    def _part(self, ticket: int, entry: Entry, held: int, start: int, stop: int) -> KVPart:
        return KVPart(ticket, held, start, stop - start, _bytes(entry.kv[:, :, start:stop]))


@torch.inference_mode()
def _bytes(kv: Tensor) -> memoryview:
    """One copy, which also makes it contiguous; numpy knows no bfloat16, so as bytes."""
    raw: np.ndarray[tuple[int], np.dtype[np.uint8]] = kv.contiguous().view(torch.uint8).reshape(-1).cpu().numpy()
    return raw.data
