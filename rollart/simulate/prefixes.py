"""The KV that a modelled engine keeps when a turn has ended, in tokens: of conversations, and of the prompts that
members of a group have in common. The least recently used goes first."""

from collections import OrderedDict

from rollart.core.types import GenerationRequest

_OPENINGS = 512


class Prefixes:
    """`tokens` is what all kept conversations take."""

    def __init__(self) -> None:
        self.tokens = 0
        self._parked: OrderedDict[str, int] = OrderedDict()
        self._openings: OrderedDict[int, None] = OrderedDict()

    def of(self, session: str) -> int:
        return self._parked.get(session, 0)

    def take(self, request: GenerationRequest) -> int:
        """How much of its context need not be computed; a conversation's KV is in use from now on."""
        most = len(request.tokens) - 1
        if request.session in self._parked:
            parked = self._parked.pop(request.session)
            self.tokens -= parked
            return min(parked, most)
        if request.turn == 0:
            opening = request.tokens.spans[0][0]  # type: ignore[attr-defined] # compact, as everything simulated
            if opening in self._openings:
                return most
            self._openings[opening] = None
            if len(self._openings) > _OPENINGS:
                self._openings.popitem(last=False)
        return 0

    def park(self, session: str, tokens: int) -> None:
        self.tokens += tokens - self._parked.pop(session, 0)
        self._parked[session] = tokens

    def shrink(self, most: float) -> None:
        """To at most so many tokens, if that can be."""
        while self._parked and self.tokens > most:
            self.tokens -= self._parked.popitem(last=False)[1]

    def clear(self) -> None:
        self._parked.clear()
        self._openings.clear()
        self.tokens = 0
