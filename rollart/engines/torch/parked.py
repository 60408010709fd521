"""KV of sequences that are not running: kept between the turns of a session, least recently used goes first.

Found again by session, and across sessions by a chain of hashes over blocks of tokens, because the members of a group
begin with the same prompt. Hashes only nominate; the tokens are always compared.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

BLOCK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """`kv` is [tensors, heads, len(tokens), dim]."""

    session: str
    tokens: list[int]
    kv: Tensor
    blocks: frozenset[int]

    @property
    def bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()


class ParkedKV:
    def __init__(self) -> None:
        self.bytes = 0
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._blocks: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def park(self, session: str, tokens: list[int], kv: Tensor) -> None:
        """Replaces what the session had."""
        self._drop(session)
        entry = Entry(session, tokens, kv, frozenset(_chain(tokens)))
        self._entries[session] = entry
        self.bytes += entry.bytes
        for block in entry.blocks:
            self._blocks.setdefault(block, {})[session] = None

    def find(self, session: str, tokens: list[int]) -> tuple[Tensor, int] | None:
        """The KV of the longest kept prefix of `tokens` and its length; at least one token is left to compute."""
        best: Entry | None = None
        length = 0
        for candidate in self._candidates(session, tokens):
            common = common_prefix(candidate.tokens, tokens, len(tokens) - 1)
            if common > length:
                best, length = candidate, common
        if best is None:
            return None
        self._entries.move_to_end(best.session)
        return best.kv, length

    def _candidates(self, session: str, tokens: list[int]) -> Iterator[Entry]:
        if session in self._entries:
            yield self._entries[session]
        holders: dict[str, None] = {}
        for block in _chain(tokens):
            if block not in self._blocks:
                break
            holders = self._blocks[block]
        if holders:
            yield self._entries[next(reversed(holders))]

    def release(self, session: str) -> None:
        """The session runs again, and will park more than it had."""
        self._drop(session)

    def shrink(self, budget: int) -> None:
        """Drops the least recently used entries until the rest fits."""
        while self.bytes > budget and self._entries:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        self.shrink(-1)

    def _drop(self, session: str) -> None:
        entry = self._entries.pop(session, None)
        if entry is None:
            return
        self.bytes -= entry.bytes
        for block in entry.blocks:
            holders = self._blocks[block]
            del holders[session]
            if not holders:
                del self._blocks[block]


def common_prefix(left: list[int], right: list[int], most: int) -> int:
    """The length of the longest common prefix, at most `most`, by halving: comparing slices is fast."""
    low, high = 0, min(len(left), len(right), most)
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _chain(tokens: list[int]) -> Iterator[int]:
    """One hash per whole block, each of the block and of all before it."""
    digest = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest = hash((digest, *tokens[start : start + BLOCK]))
        yield digest
