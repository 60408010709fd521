"""What was sampled, as segments: token sequences that only ever grew at their end.

The invariants:
- A request whose context begins with all tokens of a segment continues it, unless another request is doing so at the
  moment. Any other request begins a new segment, with its whole context as prompt: tokens that two segments share are
  trained once, where they were sampled.
- Only delivered responses are kept. Within a segment, every token is either a prompt of one of its turns or was sampled
  by the engine in exactly the context before it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

from rollart.core.types import Completion


@dataclass(slots=True, eq=False)
class Segment:
    number: int
    tokens: list[int] = field(default_factory=list)
    turns: int = 0
    busy: bool = False  # a request is continuing it


@dataclass(frozen=True, slots=True)
class Position:
    """The first `length` tokens of a segment. `ended`: they end with an end of turn."""

    segment: Segment
    length: int
    ended: bool

    @property
    def tokens(self) -> list[int]:
        return self.segment.tokens[: self.length]


@dataclass(frozen=True, slots=True)
class SegmentClaim:
    """The right to add one response to `segment`, after `context`, whose first `known` tokens the segment has already.
    `branch_of` is the segment that a new one branched off from."""

    segment: Segment
    context: list[int]
    known: int
    branch_of: Segment | None = None

    @property
    def prompt(self) -> list[int]:
        return self.context[self.known :]


class Segments:
    """Keeps at most `limit`; the least recently used is evicted."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._numbers = count()
        self._kept: OrderedDict[int, Segment] = OrderedDict()

    def has(self, segment: Segment) -> bool:
        return segment.number in self._kept

    def claim(self, context: list[int], after: Segment | None = None, *, new: bool = False) -> SegmentClaim:
        """`after` is the segment that the context was made from, if any; `new`: continue no segment."""
        best = None if new else self._continued(context)
        segment = best or Segment(next(self._numbers))
        segment.busy = True
        return SegmentClaim(segment, context, len(segment.tokens), after if best is None else None)

    def _continued(self, context: list[int]) -> Segment | None:
        """The longest free segment that the context begins with."""
        best: Segment | None = None
        for segment in self._kept.values():
            length = len(segment.tokens)
            if segment.busy or length >= len(context) or (best is not None and length <= len(best.tokens)):
                continue
            if context[length - 1] == segment.tokens[-1] and context[:length] == segment.tokens:
                best = segment
        return best

    def keep(self, claim: SegmentClaim, completion: Completion, tokens: int) -> Position:
        """The first `tokens` of the completion were delivered."""
        segment = claim.segment
        segment.tokens += claim.prompt
        segment.tokens += completion.tokens[:tokens]
        segment.turns += 1
        segment.busy = False
        self._kept[segment.number] = segment
        self._kept.move_to_end(segment.number)
        while self._limit is not None and len(self._kept) > self._limit:
            self._kept.popitem(last=False)
        whole = tokens == len(completion.tokens)
        return Position(segment, len(segment.tokens), whole and completion.finish == "stop")

    def drop(self, claim: SegmentClaim) -> None:
        claim.segment.busy = False
