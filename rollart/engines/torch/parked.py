"""KV of sequences that are not running: kept between the turns of a session, least recently used goes first."""

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from rollart.engines.torch.prefixes import PrefixIndex, chain, common_prefix


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """`kv` is [tensors, heads, len(tokens), dim]."""

    tokens: list[int]
    kv: Tensor

    @property
    def bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


class ParkedKV:
    def __init__(self) -> None:
        self.bytes = 0
        self.evicted = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._index: PrefixIndex[str] = PrefixIndex()

    def __len__(self) -> int:
        return len(self._entries)

    def park(self, session: str, tokens: list[int], kv: Tensor) -> None:
        """Replaces what the session had."""
        self.drop(session)
        self._entries[session] = entry = Entry(tokens, kv)
        self._index.add(session, chain(tokens))
        self.bytes += entry.bytes

    def find(self, session: str, tokens: list[int], blocks: tuple[int, ...]) -> tuple[Tensor | None, int]:
        """The KV that holds the longest kept prefix of `tokens`, whose chain is `blocks`, and that prefix's length."""
        best, length = None, 0
        for candidate in (session, self._index.longest(blocks)):
            entry = self._entries.get(candidate) if candidate is not None else None
            common = common_prefix(entry.tokens, tokens) if entry is not None else 0
            if entry is not None and candidate is not None and common > length:
                best, length = entry.kv, common
                self._entries.move_to_end(candidate)
        return best, length

    def drop(self, session: str) -> None:
        entry = self._entries.pop(session, None)
        if entry is not None:
            self.bytes -= entry.bytes
            self._index.remove(session)

    def shrink(self, budget: int) -> None:
        """Drops the least recently used entries until the rest fits."""
        while self._entries and self.bytes > budget:
            self.drop(next(iter(self._entries)))
            self.evicted += 1

    def clear(self) -> None:
        for session in list(self._entries):
            self.drop(session)
