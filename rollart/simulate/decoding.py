"""The sequences that a modelled engine decodes together.

Invariants: all gain tokens at the same pace, so one counter, `steps`, tells the progress of all: a sequence that joined
at step j and wants n more tokens ends at step j + n. The next to end is on top of a heap; entries of those that left
are passed over. `context` is the KV of all in tokens. Of past swaps only those are kept that a sequence here has seen.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterator

from rollart.simulate.sequence import Sequence

CLOSE = 1e-6  # of a step: rounding
_SWAPS = 64  # kept at least

Entry = tuple[float, int, Sequence]


class Decoding:
    """`count` sequences."""

    __slots__ = ("_ends", "_joined", "_order", "_swaps", "context", "count", "steps")

    def __init__(self) -> None:
        self.count, self.context, self.steps = 0, 0.0, 0.0
        self._ends: list[Entry] = []
        self._joined: list[Entry] = []
        self._order = 0
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]

    def go_on(self, steps: float) -> None:
        self.steps += steps
        self.context += self.count * steps

    def join(self, sequence: Sequence, left: float) -> None:
        """It wants `left` more tokens."""
        sequence.joined, sequence.decoding = self.steps, True
        self._order = sequence.order = self._order + 1
        self.count += 1
        self.context += sequence.base
        self._joined.append((0.0, self._order, sequence))
        if len(self._joined) > 4 * self.count + 64:
            self._joined = list(filter(_there, self._joined))
        heapq.heappush(self._ends, (self.steps + left, self._order, sequence))

    def leave(self, sequence: Sequence) -> None:
        self.count -= 1
        self.context -= sequence.base + self.steps - sequence.joined
        if not self.count:
            self.context = 0.0
        sequence.decoding = False

    def next_end(self) -> float | None:
        """The step at which the first of them ends."""
        ends = self._ends
        while ends and not _there(ends[0]):
            heapq.heappop(ends)
        return ends[0][0] if ends else None

    def ended(self) -> Iterator[Sequence]:
        """Those that have all their tokens, as they leave."""
        ends, now = self._ends, self.steps + CLOSE
        while ends and ends[0][0] <= now:
            entry = heapq.heappop(ends)
            if _there(entry):
                self.leave(entry[2])
                yield entry[2]

    def last(self) -> Sequence:
        """The one that joined last."""
        while not _there(self._joined[-1]):
            self._joined.pop()
        return self._joined[-1][2]

    # Versions

    def swapped(self, version: int) -> None:
        """From this step on, `version` makes the tokens."""
        swaps = self._swaps
        if len(swaps) > _SWAPS:
            first = min((entry[2].joined for entry in self._joined if _there(entry)), default=self.steps)
            del swaps[: bisect_right(swaps, first, key=_step) - 1]
        swaps.append((self.steps, version))

    def note_versions(self, sequence: Sequence) -> None:
        """Which versions made its tokens since it joined."""
        swaps, joined, steps = self._swaps, sequence.joined, self.steps
        if swaps[-1][0] <= joined:
            sequence.spans.append((swaps[-1][1], round(steps - joined)))
            return
        index = bisect_right(swaps, joined, key=_step) - 1
        while joined < steps:
            until = swaps[index + 1][0] if index + 1 < len(swaps) else steps
            sequence.spans.append((swaps[index][1], round(until - joined)))
            joined, index = until, index + 1


def _step(swap: tuple[float, int]) -> float:
    return swap[0]


def _there(entry: Entry) -> bool:
    """Whether it still decodes, and has not started again since."""
    sequence = entry[2]
    return sequence.decoding and sequence.order == entry[1]
