"""Generation by the controller, which pulls requests from the gateway and sends replies back.

The controller has the router, and it connects to us: its `pull` call stays open and streams requests as they come.
That is one message per request in each direction; concurrent ones share a message.

The invariants: a request is sent once. It gets a reply, or its caller cancels it or stops it early, which is sent to
the controller in the same way. A reply without a caller is dropped.
"""

import asyncio
from collections.abc import Callable
from itertools import count

from msgspec import Struct

from rollart.core.errors import EngineFailed
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest

PULL_S = 20.0  # how long one pull lasts


class PullRequest(Struct, frozen=True):
    """A request of an episode; its tokens are streamed `every` n, if n is not 0. Without a request, the caller has
    cancelled number `number`; or, with `stop`, ends it early and waits for what there is."""

    number: int
    episode: str
    request: GenerationRequest | None = None
    every: int = 0
    stop: bool = False


class PullReply(Struct, frozen=True):
    """A completion, an error, or the next `tokens` of a completion under way."""

    number: int
    completion: Completion | None = None
    error: str = ""
    tokens: list[int] | None = None


class _Pending(Struct):
    episode: str
    future: "asyncio.Future[Completion]"
    stream: TokenStream | None
    stopped: bool = False


class Upstream:
    def __init__(self) -> None:
        self._numbers = count()
        self._queue: list[PullRequest] = []
        self._send: Callable[[object], None] | None = None
        self._pending: dict[int, _Pending] = {}

    async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
        """Raises EngineFailed."""
        number, episode = next(self._numbers), request.episode
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._pending[number] = _Pending(episode, future, stream)
        self._put(PullRequest(number, episode, request, stream.every if stream is not None else 0))
        try:
            return await future
        except asyncio.CancelledError:
            self._put(PullRequest(number, episode))
            raise
        finally:
            del self._pending[number]

    def _put(self, item: PullRequest) -> None:
        if self._send is not None:
            self._send(item)
        else:
            self._queue.append(item)

    async def pull(self, send: Callable[[object], None]) -> None:
        """Sends all that is queued, and what comes within PULL_S. A later call replaces an earlier one."""
        self._send = send
        queue, self._queue = self._queue, []
        for item in queue:
            send(item)
        try:
            await asyncio.sleep(PULL_S)
        finally:
            if self._send is send:
                self._send = None

    async def reply(self, replies: list[PullReply]) -> None:
        for reply in replies:
            pending = self._pending.get(reply.number)
            if pending is None or pending.future.done():
                continue
            if reply.completion is not None:
                pending.future.set_result(reply.completion)
            elif reply.tokens is not None:
                self._stream(pending, reply.number, reply.tokens)
            else:
                pending.future.set_exception(EngineFailed(reply.error))

    def _stream(self, pending: _Pending, number: int, tokens: list[int]) -> None:
        assert pending.stream is not None
        try:
            if not pending.stopped and pending.stream.on_tokens(tokens):
                pending.stopped = True
                self._put(PullRequest(number, pending.episode, stop=True))
        except Exception as error:  # raised by the callback: its caller gets it
            pending.future.set_exception(error)
            self._put(PullRequest(number, pending.episode))
