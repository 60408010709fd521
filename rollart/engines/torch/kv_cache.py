"""KV of sequences that are not running: kept between the turns of a session, least recently used goes first.

Beside it lie the parts that came from another engine and wait for the request they were fetched for. Invariants: the
stepping thread alone changes what is kept; any thread may `find`, and one lock guards both. What is kept is never
written to again, so whoever found an entry may read it for as long as they hold it. `version` is that of the weights
that new entries are made with, and of all of them where a swap clears them.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from rollart.engines.torch.prefix_cache import PrefixIndex, chain, common_prefix


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Entry:
    """`kv` is [tensors, heads, len(tokens), dim]."""

    tokens: list[int]
    kv: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """KV of the tokens from `start` on, made by `version`: [tensors, heads, count, dim]."""

    version: int
    start: int
    kv: Tensor

    @property
    def stop(self) -> int:
        return self.start + int(self.kv.shape[2])


@dataclass(frozen=True, slots=True)
class _Fetched:
    """The key of a part: the request that it is for. Never equal to a session."""

    request: str


class ParkedKV:
    def __init__(self, version: int = 0) -> None:
        self.bytes = 0
        self.evicted = 0
        self._version = version
        self._entries: OrderedDict[str | _Fetched, Entry | Part] = OrderedDict()
        self._index: PrefixIndex[str] = PrefixIndex()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def park(self, session: str, tokens: list[int], kv: Tensor) -> None:
        """Replaces what the session had."""
        blocks = chain(tokens)
        with self._lock:
            self._put(session, Entry(tokens, kv))
            self._index.add(session, blocks)

    def find(self, session: str, tokens: list[int], blocks: tuple[int, ...]) -> tuple[Entry | None, int, int]:
        """The entry that holds the longest kept prefix of `tokens`, whose chain is `blocks`; that prefix's length; and
        the version."""
        best, length = None, 0
        with self._lock:
            for candidate in (session, self._index.longest(blocks)):
                entry = self._entries.get(candidate) if candidate is not None else None
                common = common_prefix(entry.tokens, tokens) if isinstance(entry, Entry) else 0
                if isinstance(entry, Entry) and candidate is not None and common > length:
                    best, length = entry, common
                    self._entries.move_to_end(candidate)
            return best, length, self._version

    def drop(self, session: str) -> None:
        with self._lock:
            self._remove(session)

    def hold(self, request: str, part: Part) -> None:
        """Keeps a part until its request takes it."""
        with self._lock:
            self._put(_Fetched(request), part)

    def part(self, request: str) -> Part | None:
        part = self._entries.get(_Fetched(request))
        return part if isinstance(part, Part) else None

    def release(self, request: str) -> None:
        with self._lock:
            self._remove(_Fetched(request))

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

    def renew(self, version: int, *, keep: bool) -> dict[str, int]:
        """The weights are of another version now. Answers of which sessions so many tokens' KV is forgotten."""
        gone: dict[str, int] = {}
        with self._lock:
            if not keep:
                for key, entry in self._entries.items():
                    if isinstance(key, str) and isinstance(entry, Entry):
                        gone[key] = len(entry.tokens)
                self.clear()
            self._version = version
        return gone

    def _put(self, key: str | _Fetched, value: Entry | Part) -> None:
        self._remove(key)
        self._entries[key] = value
        self.bytes += value.kv.nbytes

    def _remove(self, key: str | _Fetched) -> None:
        value = self._entries.pop(key, None)
        if value is not None:
            self.bytes -= value.kv.nbytes
            if isinstance(key, str):
                self._index.remove(key)
