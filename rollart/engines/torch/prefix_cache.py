"""Index of shared prefixes: who has the beginning of a token sequence, by a chain of hashes over blocks of tokens.

The members of a group share their prompt, and the prompts of a task their instructions, so a prefix is often cached in
another session. Hashes only nominate: the caller compares the tokens.
"""

from collections.abc import Hashable
from typing import Generic, TypeVar

BLOCK = 16

K = TypeVar("K", bound=Hashable)


class PrefixIndex(Generic[K]):
    def __init__(self) -> None:
        self._holders: dict[int, dict[K, None]] = {}
        self._blocks: dict[K, frozenset[int]] = {}

    def add(self, holder: K, blocks: tuple[int, ...]) -> None:
        """`blocks` is the hash chain of all that the holder has or is computing."""
        self.remove(holder)
        self._blocks[holder] = frozenset(blocks)
        for block in self._blocks[holder]:
            self._holders.setdefault(block, {})[holder] = None

    def remove(self, holder: K) -> None:
        for block in self._blocks.pop(holder, ()):
            holders = self._holders[block]
            del holders[holder]
            if not holders:
                del self._holders[block]

    def clear(self) -> None:
        self._holders.clear()
        self._blocks.clear()

    def longest(self, blocks: tuple[int, ...]) -> K | None:
        """Of the holders that share the most leading blocks, the first that was added."""
        found: dict[K, None] | None = None
        for block in blocks:
            holders = self._holders.get(block)
            if holders is None:
                break
            found = holders
        return next(iter(found)) if found else None


def chain(tokens: list[int]) -> tuple[int, ...]:
    """One hash per full block, of the block and all before it."""
    digest = 0
    digests = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest = hash((digest, *tokens[start : start + BLOCK]))
        digests.append(digest)
    return tuple(digests)


def common_prefix(left: list[int], right: list[int]) -> int:
    """The length of the longest common prefix, by halving: comparing slices is fast."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
