"""The prefix cache of a simulated engine, by numbers of tokens."""

from collections import OrderedDict

from rollart.core.types import GenerationRequest

_MAX_PROMPTS = 512


def _spans(request: GenerationRequest) -> tuple[tuple[int, int], ...]:
    spans: tuple[tuple[int, int], ...] = request.tokens.spans  # type: ignore[attr-defined] # as all simulated tokens
    return spans


def prompt_of(request: GenerationRequest) -> int:
    """Tokens of the prompt of its conversation."""
    return _spans(request)[0][1]


class SimulatedPrefixCache:
    """KV of past turns and of prompts that a group shares, in tokens, least recently used first. `tokens` is the size
    of all cached conversations."""

    def __init__(self) -> None:
        self.tokens = 0
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._prompts: OrderedDict[int, None] = OrderedDict()

    def missing(self, request: GenerationRequest) -> int:
        """How many tokens must be fetched; the prompt of a group is fetched once."""
        limit = len(request.tokens) - 1
        if request.session in self._sessions or request.turn:
            return limit - self._sessions.get(request.session, 0)
        return 0 if self._has_prompt(request) else limit

    def take(self, request: GenerationRequest, length: int) -> int:
        """How many of its `length` tokens are cached; a conversation's KV leaves the cache, as it is in use now.
        Of a request that leaves out a part of its conversation, only the prompt can be cached."""
        limit = len(request.tokens) - 1
        if length <= limit:
            return min(prompt_of(request), length - 1) if self._has_prompt(request) else 0
        if request.session in self._sessions:
            cached = self._sessions.pop(request.session)
            self.tokens -= cached
            return min(cached, limit)
        return limit if request.turn == 0 and self._has_prompt(request) else 0

    def _has_prompt(self, request: GenerationRequest) -> bool:
        """Whether the prompt is here; from now on it is."""
        prompt = _spans(request)[0][0]
        if prompt in self._prompts:
            return True
        self._prompts[prompt] = None
        if len(self._prompts) > _MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return False

    def put(self, session: str, tokens: int) -> None:
        self.tokens += tokens - self._sessions.pop(session, 0)
        self._sessions[session] = tokens

    def evict(self, limit: float) -> None:
        """Down to at most `limit` tokens of conversations. The last blocks of a conversation go first, so what is left
        of it is a prefix that can be used."""
        while self._sessions and self.tokens > limit:
            session, tokens = self._sessions.popitem(last=False)
            left = min(tokens, max(0, int(limit) - self.tokens + tokens))
            self.tokens -= tokens - left
            if left:
                self._sessions[session] = left
                self._sessions.move_to_end(session, last=False)
                break

    def clear(self) -> None:
        self._sessions.clear()
        self._prompts.clear()
        self.tokens = 0
