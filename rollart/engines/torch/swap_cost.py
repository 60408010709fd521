"""What swaps of weights cost beside the time that they take: KV that was there has to be computed again.

That is the KV of requests in flight, and of kept sessions when their next turn comes. It costs what its steps take
beyond the tokens decoded in them, at the speed at which tokens have been decoded lately: so a step that is emptier,
because others wait for their KV, counts as lost to that extent. And where a swap waits for the requests in flight,
steps before it are emptier too. For the stepping thread alone.
"""

from collections.abc import Mapping, Sequence

from rollart.engines.torch.batch import Chunk
from rollart.engines.torch.sequence import EngineSequence

REMEMBERED = 4096
LATELY = 0.5  # what the last step counts for


class SwapCost:
    def __init__(self) -> None:
        self._seconds = self._drained = self._token_s = 0.0
        self._sessions: dict[str, int] = {}

    def record_swap(self, forgotten: Mapping[str, int]) -> float:
        """A swap has taken away so many tokens' KV of each of these sessions. Answers what the one before it has cost
        until now. Sessions that do not come back are forgotten when there are too many of them."""
        for session, tokens in forgotten.items():
            self._sessions.pop(session, None)
            self._sessions[session] = tokens
        for session in list(self._sessions)[:-REMEMBERED]:
            del self._sessions[session]
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def record_drain(self, share: float, seconds: float) -> None:
        """A step of so many seconds ran while a swap was waited for, with so much of its rows free for that reason."""
        self._drained += share * seconds

    def take_drain_s(self) -> float:
        """The seconds that waiting for this swap has cost."""
        seconds, self._drained = self._drained, 0.0
        return seconds

    def mark_lost(self, sequence: EngineSequence) -> None:
        """What its session has lost, at its admission."""
        sequence.lost = max(sequence.lost, self._sessions.pop(sequence.session, 0))

    def record_step(
        self, running: Sequence[EngineSequence], decoding: int, chunks: Sequence[Chunk], seconds: float
    ) -> None:
        """A step of so many `seconds` computed these chunks, and a token for each of `decoding` sequences."""
        if not chunks:
            self._token_s += LATELY * (seconds / decoding - self._token_s) if self._token_s else seconds / decoding
            return
        again = sum(max(0, min(running[chunk.row].lost, chunk.start + chunk.count) - chunk.start) for chunk in chunks)
        if again:
            beyond = max(0.0, seconds - decoding * self._token_s)
            self._seconds += beyond * again / sum(chunk.count for chunk in chunks)
