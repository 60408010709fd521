"""What weight swaps cost besides their own time: KV that must be recomputed.

That is the KV of requests in flight, and of cached sessions at their next turn. It costs what its steps take beyond the
tokens decoded in them, at the moving average of the decoding speed: a step with fewer decoding rows, because others
wait for their KV, counts as lost to that extent. Where a swap waits for the requests in flight (drain), the steps
before it run with free rows too. For the stepping thread only.
"""

from collections.abc import Mapping, Sequence

from rollart.engines.torch.batch import Chunk
from rollart.engines.torch.sequence import EngineSequence

MAX_SESSIONS = 4096
SMOOTHING = 0.5  # weight of the last step in the moving average


class SwapCost:
    def __init__(self) -> None:
        self._seconds = self._drained = self._token_s = 0.0
        self._sessions: dict[str, int] = {}

    def record_swap(self, forgotten: Mapping[str, int]) -> float:
        """`forgotten` is the number of dropped tokens by session. Returns the seconds that the swap before this one has
        cost. The oldest sessions are dropped beyond `MAX_SESSIONS`."""
        for session, tokens in forgotten.items():
            self._sessions.pop(session, None)
            self._sessions[session] = tokens
        for session in list(self._sessions)[:-MAX_SESSIONS]:
            del self._sessions[session]
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def record_drain(self, share: float, seconds: float) -> None:
        """A step of `seconds` ran while a swap waited, with this `share` of its rows free."""
        self._drained += share * seconds

    def take_drain_s(self) -> float:
        """The seconds lost by draining for this swap; resets them."""
        seconds, self._drained = self._drained, 0.0
        return seconds

    def mark_lost(self, sequence: EngineSequence) -> None:
        """At its admission: the tokens that its session lost."""
        sequence.lost = max(sequence.lost, self._sessions.pop(sequence.session, 0))

    def record_step(
        self, running: Sequence[EngineSequence], decoding: int, chunks: Sequence[Chunk], seconds: float
    ) -> None:
        """A step of `seconds` computed these chunks, and a token for each of `decoding` sequences."""
        if not chunks:
            self._token_s += SMOOTHING * (seconds / decoding - self._token_s) if self._token_s else seconds / decoding
            return
        again = sum(max(0, min(running[chunk.row].lost, chunk.start + chunk.count) - chunk.start) for chunk in chunks)
        if again:
            beyond = max(0.0, seconds - decoding * self._token_s)
            self._seconds += beyond * again / sum(chunk.count for chunk in chunks)
