"""Contexts of conversations on both sides of the connection to an engine, so that only new tokens cross it.

Invariants: the engine's side keeps the last context that it was sent of each conversation; they are bounded, and the
least recently used is forgotten. A client leaves out only what it sent itself, under a name that no other client uses.
If the engine has forgotten it, it says so before it starts, and is sent the whole.
"""

from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from uuid import uuid4

from msgspec import Struct

from rollart.core.types import Completion, GenerationRequest
from rollart.launch.rpc import Stream

MAX_CONVERSATIONS = 1 << 16  # whose lengths a client knows
MAX_TOKENS = 16 << 20  # that an engine keeps, of 4 bytes


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request whose tokens are streamed as TokenParts: the first one at once, the others in groups of `every`. Its
    context may be kept by a name, if there is one; the first `known` tokens were sent before and are left out."""

    request: GenerationRequest
    every: int
    name: str = ""
    known: int = 0


class Extended(Struct, frozen=True):
    """The answer to a request with a part of its context. None: the engine has forgotten the rest."""

    completion: Completion | None = None


class SentContexts:
    """The client's side: how much of each conversation its engine was sent."""

    def __init__(self) -> None:
        self._client = uuid4().hex
        self._sent: OrderedDict[int, int] = OrderedDict()

    def whole(self, request: GenerationRequest, every: int) -> StreamRequest:
        name = f"{self._client}-{request.conversation}" if request.conversation else ""
        return StreamRequest(request, every, name)

    def shortened(self, request: GenerationRequest, every: int) -> StreamRequest:
        """Without what the engine was sent before; the whole if that is nothing."""
        whole = self.whole(request, every)
        if not whole.name:
            return whole
        known = self._sent.pop(request.conversation, 0)
        self._sent[request.conversation] = len(request.tokens)
        if len(self._sent) > MAX_CONVERSATIONS:
            self._sent.popitem(last=False)
        if not known:
            return whole
        return StreamRequest(replace(request, tokens=request.tokens[known:]), every, whole.name, known)


class KeptContexts:
    """The engine's side: methods for its callers, around its own `stream`."""

    def __init__(
        self, stream: Callable[[StreamRequest, Stream], Awaitable[Completion]], limit: int = MAX_TOKENS
    ) -> None:
        self._stream, self._limit = stream, limit
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._tokens = 0

    async def stream(self, streamed: StreamRequest, on_part: Stream) -> Completion:
        """With the whole context."""
        if streamed.name:
            self._forget(streamed.name)
            self._keep(streamed.name, array("I", streamed.request.tokens))
        return await self._stream(streamed, on_part)

    async def extend(self, streamed: StreamRequest, on_part: Stream) -> Extended:
        """With what follows the first `known` tokens."""
        kept = self._forget(streamed.name)
        if len(kept) < streamed.known:
            return Extended()
        del kept[streamed.known :]
        kept.extend(streamed.request.tokens)
        self._keep(streamed.name, kept)
        whole = replace(streamed.request, tokens=kept.tolist())
        return Extended(await self._stream(StreamRequest(whole, streamed.every), on_part))

    def _forget(self, name: str) -> "array[int]":
        kept = self._kept.pop(name, None)
        if kept is None:
            return array("I")
        self._tokens -= len(kept)
        return kept

    def _keep(self, name: str, tokens: "array[int]") -> None:
        self._kept[name] = tokens
        self._tokens += len(tokens)
        while self._tokens > self._limit:
            self._forget(next(iter(self._kept)))
