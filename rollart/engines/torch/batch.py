"""Who runs and who waits: the pure state of continuous batching, without a tensor.

Invariants: running sequences sit in rows 0..size-1 without a gap. The first `decoding` rows have exactly one token
whose KV is missing; the rest are being prefilled, and get their chunks in row order, so that those which complete are
always the first of them. A row is never reordered except into the gap that another one leaves.
"""

from collections import deque
from dataclasses import dataclass

from rollart.engines.torch.sequence import EngineSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens `start`..`start + count` of the sequence in `row`, computed in one step."""

    row: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Move:
    """The contents of row `source` go to the free row `target`."""

    source: int
    target: int


class BatchState:
    def __init__(self) -> None:
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        self.decoding = 0

    @property
    def size(self) -> int:
        return len(self.running)

    @property
    def longest(self) -> int:
        """The length that the longest running sequence may reach."""
        return max((sequence.limit for sequence in self.running), default=0)

    @property
    def prefilling(self) -> int:
        """Tokens of running sequences that wait for their prefill."""
        return sum(sequence.pending for sequence in self.running[self.decoding :])

    def admit(self, sequence: EngineSequence) -> int:
        """Adds the sequence in the next row; returns the row."""
        self.running.append(sequence)
        return len(self.running) - 1

    def chunks(self, budget: int) -> list[Chunk]:
        """What the prefilling rows compute in this step: at most `budget` tokens, in row order."""
        chunks = []
        for row in range(self.decoding, len(self.running)):
            if budget <= 0:
                break
            sequence = self.running[row]
            count = min(sequence.pending, budget)
            chunks.append(Chunk(row, sequence.computed, count))
            budget -= count
        return chunks

    def settle(self) -> None:
        """After a step: rows whose prefill is complete now decode."""
        while self.decoding < len(self.running) and self.running[self.decoding].pending <= 1:
            self.decoding += 1

    def remove(self, row: int) -> list[Move]:
        """Takes the sequence out of its row; returns the moves that close the gap, to be done in this order."""
        moves = []
        if row < self.decoding:
            self.decoding -= 1
            moves.append(self._move(self.decoding, row))
            row = self.decoding
        moves.append(self._move(len(self.running) - 1, row))
        self.running.pop()
        return [move for move in moves if move.source != move.target]

    def _move(self, source: int, target: int) -> Move:
        self.running[target] = self.running[source]
        return Move(source, target)

    def restart(self) -> None:
        """All KV must be recomputed: running sequences go to the front of the queue with what they have generated."""
        for sequence in self.running:
            sequence.lost = max(sequence.lost, sequence.computed)
            sequence.computed = 0
        self.waiting.extendleft(reversed(self.running))
        self.running, self.decoding = [], 0

    def clear(self) -> list[EngineSequence]:
        """Empties it; returns all sequences, running and waiting."""
        everything = [*self.running, *self.waiting]
        self.running, self.decoding = [], 0
        self.waiting.clear()
        return everything
