"""What was sampled, as segments: token sequences that only ever grew at their end.

The invariants:
- A request whose context begins with all of a segment, and which nobody else continues at this moment, continues that
  segment. Any other request begins a new one, with its whole context as prompt: so what an earlier segment holds of the
  same beginning is context there, and is trained once, where it was sampled.
- Only delivered answers are kept. Within a segment, every token is either a prompt of one of its turns or was sampled
  by the engine in exactly the context that stands before it.
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
    busy: bool = False  # somebody is continuing it


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
class Claim:
    """The right to add one answer to `segment`, after `context`, of which `known` tokens are there already. `branch_of`
    is the segment that a new one left."""

    segment: Segment
    context: list[int]
    known: int
    branch_of: Segment | None = None

    @property
    def prompt(self) -> list[int]:
        return self.context[self.known :]


class Segments:
    """Keeps at most `limit`; the one unused for longest goes first."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._numbers = count()
        self._kept: OrderedDict[int, Segment] = OrderedDict()

    def has(self, segment: Segment) -> bool:
        return segment.number in self._kept

    def claim(self, context: list[int], after: Segment | None = None, *, anew: bool = False) -> Claim:
        """`after` is what the context was made from, if anything; `anew`: not to continue it, nor anything else."""
        best = None if anew else self._continued(context)
        segment = best or Segment(next(self._numbers))
        segment.busy = True
        return Claim(segment, context, len(segment.tokens), after if best is None else None)

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

    def keep(self, claim: Claim, completion: Completion, tokens: int) -> Position:
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

    def drop(self, claim: Claim) -> None:
        claim.segment.busy = False
