"""KV of sequences that are not running: kept between the turns of a session, least recently used goes first.

Beside it lie the parts that came from another engine and wait for the request they were fetched for. Invariants: the
stepping thread alone changes what is kept; any thread may `find`, and one lock guards both. What is kept is never
written to again, so whoever found an entry may read it for as long as they hold it. `version` is that of the weights
that new entries are made with, and of all of them where a swap clears them.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollart.engines.torch.kv_rows import KVRows
from rollart.engines.torch.prefix_cache import BLOCK, PrefixIndex, chain, common_prefix
from rollart.engines.torch.sequence import EngineSequence


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CacheEntry:
    """`kv` is [tensors, heads, len(tokens), dim]."""

    tokens: list[int]
    kv: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class FetchedKV:
    """KV of the tokens from `start` on, made by `version`: [tensors, heads, count, dim]."""

    version: int
    start: int
    kv: Tensor

    @property
    def stop(self) -> int:
        return self.start + int(self.kv.shape[2])


@dataclass(frozen=True, slots=True)
class _RequestKey:
    """The key of a part: the request that it is for. Never equal to a session."""

    request: str


class KVCache:
    def __init__(self, version: int = 0) -> None:
        self.bytes = 0
        self.evicted = 0
        self._version = version
        self._entries: OrderedDict[str | _RequestKey, CacheEntry | FetchedKV] = OrderedDict()
        self._index: PrefixIndex[str] = PrefixIndex()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def store(self, session: str, tokens: list[int], kv: Tensor) -> None:
        """Replaces what the session had."""
        blocks = chain(tokens)
        with self._lock:
            self._put(session, CacheEntry(tokens, kv))
            self._index.add(session, blocks)

    def find(self, session: str, tokens: list[int], blocks: tuple[int, ...]) -> tuple[CacheEntry | None, int, int]:
        """The entry that holds the longest kept prefix of `tokens`, whose chain is `blocks`; that prefix's length; and
        the version."""
        best, length = None, 0
        with self._lock:
            for candidate in (session, self._index.longest(blocks)):
                entry = self._entries.get(candidate) if candidate is not None else None
                common = common_prefix(entry.tokens, tokens) if isinstance(entry, CacheEntry) else 0
                if isinstance(entry, CacheEntry) and candidate is not None and common > length:
                    best, length = entry, common
                    self._entries.move_to_end(candidate)
            return best, length, self._version

    def drop(self, session: str) -> None:
        with self._lock:
            self._remove(session)

    def store_fetched(self, request: str, part: FetchedKV) -> None:
        """Keeps a part until its request takes it."""
        with self._lock:
            self._put(_RequestKey(request), part)

    def fetched(self, request: str) -> FetchedKV | None:
        part = self._entries.get(_RequestKey(request))
        return part if isinstance(part, FetchedKV) else None

    def drop_fetched(self, request: str) -> None:
        with self._lock:
            self._remove(_RequestKey(request))

    def shrink(self, budget: int) -> None:
        """Drops the least recently used entries until the rest fits."""
        with self._lock:
            while self._entries and self.bytes > budget:
                self._remove(next(iter(self._entries)))
                self.evicted += 1

    def clear(self) -> None:
        with self._lock:
            for key in list(self._entries):
                self._remove(key)

    def set_version(self, version: int, *, keep: bool) -> dict[str, int]:
        """The weights are of another version now. Answers of which sessions so many tokens' KV is forgotten."""
        gone: dict[str, int] = {}
        with self._lock:
            if not keep:
                for key, entry in self._entries.items():
                    if isinstance(key, str) and isinstance(entry, CacheEntry):
                        gone[key] = len(entry.tokens)
                self.clear()
            self._version = version
        return gone

    def _put(self, key: str | _RequestKey, value: CacheEntry | FetchedKV) -> None:
        self._remove(key)
        self._entries[key] = value
        self.bytes += value.kv.nbytes

    def _remove(self, key: str | _RequestKey) -> None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.bytes -= value.kv.nbytes
            if isinstance(key, str):
                self._index.remove(key)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The KV of the first `own` tokens is in `entry`, or in the row of `holder`; that of those until `length` is in
    `part`, which came from another engine."""

    entry: CacheEntry | None
    holder: EngineSequence | None
    own: int
    part: FetchedKV | None
    length: int

    def copy(self, row: int, rows: KVRows, running: Sequence[EngineSequence]) -> None:
        if self.entry is not None:
            rows.write(row, 0, self.entry.kv[:, :, : self.own])
        elif self.holder is not None and self.own:
            rows.copy(running.index(self.holder), row, self.own)
        if self.part is not None and self.length > self.own:
            start = self.part.start
            rows.write(row, self.own, self.part.kv[:, :, self.own - start : self.length - start])


def find_prefix(sequence: EngineSequence, kv_cache: KVCache, live: PrefixIndex[EngineSequence]) -> PrefixHit | None:
    """None: wait, another sequence, of those in `live`, is about to have more of it.

    At least one token is left to compute, because the next one is sampled from its logits.
    """
    most = len(sequence.tokens) - 1
    entry, own, _ = kv_cache.find(sequence.session, sequence.tokens, sequence.blocks)
    own, promised = min(own, most), 0
    holder = live.longest(sequence.blocks)
    if holder is not None:
        promised = min(common_prefix(holder.tokens, sequence.tokens), most)
        ready = min(promised, holder.computed)
        if ready > own:
            entry, own = None, ready
    part, length = kv_cache.fetched(sequence.id), own
    if part is not None and part.start <= own:
        length = max(min(part.stop, most), own)
    if promised - length >= BLOCK:
        return None
    return PrefixHit(entry, None if entry is not None else holder, own, part, length)
