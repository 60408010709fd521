"""The text of an answer while it is being made: what of it may be shown, and whether it is over.

The invariants: what is shown is a beginning of what the whole answer will say. Held back are the bytes of a character
that is not complete, what may turn out to be a stop string, and what may belong to the call of a tool, with the space
before it. Each token is decoded a few times at most, however long the answer.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # how a decoder writes bytes that are no character, or not yet
Text = Callable[[Sequence[int]], str]
Held = Callable[[str], int]


class Transcript:
    """`decode` gives the text of tokens; `held` says from where on a text may belong to a call, if there may be calls.
    `over`: a stop string is there."""

    def __init__(self, decode: Text, stops: Sequence[str], held: Held | None = None) -> None:
        self._decode, self._stops, self._held = decode, [stop for stop in stops if stop], held
        self.clear()

    def clear(self) -> None:
        self._tokens: list[int] = []
        self._from = self._read = 0  # tokens that the next ones are decoded after, and those whose text is known
        self._text = ""
        self._end: int | None = None  # where the stop string is
        self.shown = 0

    @property
    def over(self) -> bool:
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

    def fresh(self) -> str:
        """What may be shown beyond what was `shown`."""
        text = self._text if self._end is None else self._text[: self._end]
        end = len(text)
        if self._end is None:
            end = min((end - overlap(text, stop) for stop in self._stops), default=end)
        if self._held is not None:
            end = len(text[: min(end, self._held(text))].rstrip())
        return text[self.shown : end]


def cut(decode: Text, tokens: Sequence[int], stops: Sequence[str]) -> tuple[str, int, int, str | None]:
    """What a whole answer says, to how many of its characters and by how many of its tokens, if it ends with the stop
    string that is complete first, which is told last. Tokens after that were made before anybody knew, and say
    nothing."""
    text, wanted = decode(tokens), [stop for stop in stops if stop]
    if not any(stop in text for stop in wanted):
        return text, len(text), len(tokens), None

    def complete(last: int) -> bool:
        said = decode(tokens[: last + 1])
        return any(stop in said for stop in wanted)

    used = 1 + bisect_left(range(len(tokens)), True, key=complete)
    text = decode(tokens[:used])
    at, stop = min((text.find(stop), stop) for stop in wanted if stop in text)
    return text, at, used, stop


def overlap(text: str, word: str) -> int:
    """How many characters at the end of `text` are a beginning of `word`, but not all of it."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0
