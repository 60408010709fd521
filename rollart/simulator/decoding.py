"""The sequences that a simulated engine decodes together.

Invariants: all gain tokens at the same pace, so one counter, `steps`, is the progress of all: a sequence that joined at
step j and needs n more tokens ends at step j + n. The next to end is on top of a heap; entries of sequences that left
are skipped. `context` is the KV of all, in tokens. Past swaps are kept only while a decoding sequence has seen them.
"""

import asyncio
import heapq
from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from msgspec import Struct

from rollart.core.run_length import RunLength, run_of
from rollart.core.types import Completion, Finish, GenerationRequest

CLOSE = 1e-6  # of a step: rounding
_MIN_SWAPS = 64  # kept at least


class SimulatedSequence(Struct, eq=False):
    """A request from its arrival to its completion: `length` tokens of context, `new` of them to prefill, `target` to
    generate. `made` and `spans` (version, tokens) are from before a preemption. `base` is its context when it joined
    the decoding batch at step `joined`."""

    request: GenerationRequest
    result: asyncio.Future[Completion]
    length: int
    new: int
    target: int
    finish: Finish
    began: float
    cached: int = 0
    fetched: int = 0
    admitted: float = -1.0
    first: float = -1.0
    made: float = 0.0
    base: float = 0.0
    joined: float = 0.0
    order: int = 0
    decoding: bool = False
    cancelled: bool = False
    spans: list[tuple[int, int]] = []

    def completion(self, now: float) -> Completion:
        tokens: Any = run_of(0, self.target)
        versions: Any = self._versions()
        return Completion(
            tokens,
            tokens,
            versions,
            self.finish,
            prompt=self.length,
            cached=self.cached,
            fetched=self.fetched,
            queue_s=self.admitted - self.began,
            prefill_s=self.first - self.admitted,
            decode_s=now - self.first,
        )

    def _versions(self) -> RunLength:
        """Merged by version, and exactly one per token: parts of steps were rounded."""
        counts: dict[int, int] = {}
        for version, count in self.spans:
            counts[version] = counts.get(version, 0) + count
        last = self.spans[-1][0] if self.spans else 0
        if len(counts) == 1:
            return run_of(last, self.target)
        counts[last] = counts.get(last, 0) + self.target - sum(counts.values())
        return RunLength(tuple((version, count) for version, count in counts.items() if count > 0), self.target)


Entry = tuple[float, int, SimulatedSequence]


class DecodingBatch:
    """`count` sequences that decode in lockstep."""

    __slots__ = ("_ends", "_joined", "_order", "_swaps", "context", "count", "steps")

    def __init__(self) -> None:
        self.count, self.context, self.steps = 0, 0.0, 0.0
        self._ends: list[Entry] = []
        self._joined: list[Entry] = []
        self._order = 0
        self._swaps: list[tuple[float, int]] = [(0.0, 0)]

    def advance(self, steps: float) -> None:
        self.steps += steps
        self.context += self.count * steps

    def join(self, sequence: SimulatedSequence, left: float) -> None:
        """Add a sequence that needs `left` more tokens."""
        sequence.joined, sequence.decoding = self.steps, True
        self._order = sequence.order = self._order + 1
        self.count += 1
        self.context += sequence.base
        self._joined.append((0.0, self._order, sequence))
        if len(self._joined) > 4 * self.count + 64:
            self._joined = list(filter(_active, self._joined))
        heapq.heappush(self._ends, (self.steps + left, self._order, sequence))

    def leave(self, sequence: SimulatedSequence) -> None:
        self.count -= 1
        self.context -= sequence.base + self.steps - sequence.joined
        if not self.count:
            self.context = 0.0
        sequence.decoding = False

    def next_end(self) -> float | None:
        """The step at which the next sequence ends."""
        ends = self._ends
        while ends and not _active(ends[0]):
            heapq.heappop(ends)
        return ends[0][0] if ends else None

    def pop_ended(self) -> Iterator[SimulatedSequence]:
        """Remove and return the sequences that have all their tokens."""
        ends, now = self._ends, self.steps + CLOSE
        while ends and ends[0][0] <= now:
            entry = heapq.heappop(ends)
            if _active(entry):
                self.leave(entry[2])
                yield entry[2]

    def last(self) -> SimulatedSequence:
        """The sequence that joined last."""
        while not _active(self._joined[-1]):
            self._joined.pop()
        return self._joined[-1][2]

    # Versions

    def swap(self, version: int) -> None:
        """From this step on, `version` samples the tokens."""
        swaps = self._swaps
        if len(swaps) > _MIN_SWAPS:
            first = min((entry[2].joined for entry in self._joined if _active(entry)), default=self.steps)
            del swaps[: bisect_right(swaps, first, key=itemgetter(0)) - 1]
        swaps.append((self.steps, version))

    def record_versions(self, sequence: SimulatedSequence) -> None:
        """Record which versions sampled its tokens since it joined."""
        swaps, joined, steps = self._swaps, sequence.joined, self.steps
        if swaps[-1][0] <= joined:
            sequence.spans.append((swaps[-1][1], round(steps - joined)))
            return
        index = bisect_right(swaps, joined, key=itemgetter(0)) - 1
        while joined < steps:
            until = swaps[index + 1][0] if index + 1 < len(swaps) else steps
            sequence.spans.append((swaps[index][1], round(until - joined)))
            joined, index = until, index + 1


def _active(entry: Entry) -> bool:
    """Whether it still decodes and was not preempted since."""
    sequence = entry[2]
    return sequence.decoding and sequence.order == entry[1]
