"""Text of a response while its tokens arrive: what may be sent to the client, and whether a stop string ended it.

The invariants: what was sent is a prefix of the final text. Held back are incomplete characters, what may become a stop
string, and what may belong to a tool call, with the space before it. Each token is decoded a few times at most, however
long the response.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from rollart.models.tool_calls import overlap

BROKEN = "\ufffd"  # what bytes of an incomplete character are decoded to
Decode = Callable[[Sequence[int]], str]
CallStart = Callable[[str], int]
Split = Callable[[str], tuple[str, int]]


class IncrementalDetokenizer:
    """`call_start` returns from where on a text may belong to a tool call; None if there are no tools. `split` returns
    the reasoning and where the answer begins, of which alone text is sent. The caller counts the characters that it has
    `sent`."""

    def __init__(
        self, decode: Decode, stops: Sequence[str], call_start: CallStart | None = None, split: Split | None = None
    ) -> None:
        self._decode, self._stops, self._call_start = decode, [stop for stop in stops if stop], call_start
        self._split = split
        self.clear()

    def clear(self) -> None:
        self._tokens: list[int] = []
        self._from = self._read = 0  # the window that the next tokens are decoded with; where their own text begins
        self._text = ""
        self._end: int | None = None  # position of the stop string
        self.sent = 0

    @property
    def reasoning(self) -> str:
        return "" if self._split is None else self._split(self._text)[0]

    @property
    def stopped(self) -> bool:
        return self._end is not None

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        known = self._decode(self._tokens[self._from : self._read])
        more = self._decode(self._tokens[self._from :])
        if len(more) <= len(known) or more.endswith(BROKEN):
            return
        before = len(self._text)
        self._text += more[len(known) :]
        self._from, self._read = self._read, len(self._tokens)
        if self._end is None:
            found = [self._text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops]
            self._end = min((at for at in found if at >= 0), default=None)

    def unsent(self) -> str:
        """What may be sent now."""
        text = self._text if self._end is None else self._text[: self._end]
        end = len(text)
        if self._end is None:
            end = min((end - overlap(text, stop) for stop in self._stops), default=end)
        begin = 0 if self._split is None else self._split(text)[1]
        if self._call_start is not None:
            end = begin + len(text[begin : min(end, begin + self._call_start(text[begin:]))].rstrip())
        return text[begin + self.sent : end]


def cut_at_stop(decode: Decode, tokens: Sequence[int], stops: Sequence[str]) -> tuple[str, int, int, str | None]:
    """Cut a completion at the stop string that is complete first: the text of the tokens used, the length of it before
    the stop string, the number of tokens used, and the stop string. Tokens after that are ignored."""
    text, stops = decode(tokens), [stop for stop in stops if stop]
    if not any(stop in text for stop in stops):
        return text, len(text), len(tokens), None

    def complete(last: int) -> bool:
        prefix = decode(tokens[: last + 1])
        return any(stop in prefix for stop in stops)

    used = 1 + bisect_left(range(len(tokens)), True, key=complete)
    text = decode(tokens[:used])
    at, stop = min((text.find(stop), stop) for stop in stops if stop in text)
    return text, at, used, stop
