"""KV of sequences that are not running, kept between the turns of a session; an LRU cache.

It also keeps KV fetched from other engines until the request that it was fetched for takes it. Invariants: only the
stepping thread changes the cache; any thread may `find`; one lock guards both. Entries are never written to again, so
a reader may keep one for as long as it likes. The version is that of the weights that compute new entries, and of all
entries where a swap clears the cache.
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
    """`kv` is [tensors, heads, len(tokens), dim]; `experts` are the rows of `ExpertChoices`, if they are recorded."""

    tokens: list[int]
    kv: Tensor
    experts: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class FetchedKV:
    """KV of the tokens from `start` on, computed with `version`: [tensors, heads, count, dim]."""

    version: int
    start: int
    kv: Tensor

    @property
    def stop(self) -> int:
        return self.start + int(self.kv.shape[2])


@dataclass(frozen=True, slots=True)
class _RequestKey:
    """Key of fetched KV: the request that it is for. Never equal to a session."""

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

    def store(self, session: str, tokens: list[int], kv: Tensor, experts: bytes = b"") -> None:
        """Replaces what the session had."""
        blocks = chain(tokens)
        with self._lock:
            self._put(session, CacheEntry(tokens, kv, experts))
            self._index.add(session, blocks)

    def find(self, session: str, tokens: list[int], blocks: tuple[int, ...]) -> tuple[CacheEntry | None, int, int]:
        """The entry with the longest cached prefix of `tokens`, whose hash chain is `blocks`; the prefix's length; the
        version."""
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
        """Kept until its request takes it."""
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
        """After a swap. Returns the number of dropped tokens by session."""
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
    """KV of the first `own` tokens is in `entry`, or in the row of `holder`; from there to `length` it is in `fetched`,
    which came from another engine."""

    entry: CacheEntry | None
    holder: EngineSequence | None
    own: int
    fetched: FetchedKV | None
    length: int

    def copy(self, row: int, rows: KVRows, running: Sequence[EngineSequence]) -> None:
        if self.entry is not None:
            rows.write(row, 0, self.entry.kv[:, :, : self.own])
        elif self.holder is not None and self.own:
            rows.copy(running.index(self.holder), row, self.own)
        if self.fetched is not None and self.length > self.own:
            start = self.fetched.start
            rows.write(row, self.own, self.fetched.kv[:, :, self.own - start : self.length - start])

    def experts(self, row: int) -> bytes:
        """Of the tokens whose KV is here, a row of `row` bytes each; those from another engine have none."""
        source = self.holder if self.entry is None else self.entry
        return b"" if source is None else bytes(source.experts[: self.own * row])


def find_prefix(sequence: EngineSequence, kv_cache: KVCache, live: PrefixIndex[EngineSequence]) -> PrefixHit | None:
    """KV of its prefix, to be copied instead of computed; None: wait, a sequence in `live` is computing more of it.
    At least one token is left to compute: the next one is sampled from its logits."""
    most = len(sequence.tokens) - 1
    entry, own, _ = kv_cache.find(sequence.session, sequence.tokens, sequence.blocks)
    own, promised = min(own, most), 0
    holder = live.longest(sequence.blocks)
    if holder is not None:
        promised = min(common_prefix(holder.tokens, sequence.tokens), most)
        ready = min(promised, holder.computed)
        if ready > own:
            entry, own = None, ready
    fetched, length = kv_cache.fetched(sequence.id), own
    if fetched is not None and fetched.start <= own:
        length = max(min(fetched.stop, most), own)
    if promised - length >= BLOCK:
        return None
    return PrefixHit(entry, None if entry is not None else holder, own, fetched, length)
