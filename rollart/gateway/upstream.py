"""Generation that somebody else does: the controller, which asks for work and answers it.

The controller has the router and is the one who connects: it asks for work once in a while, is told of requests as they
come, and sends answers back. Either way is one message a request, and what happens at the same time shares it.

The invariants: a request is told once; it is answered, or its caller gives up or has enough, which the controller is
told in the same way; an answer that nobody waits for any more is dropped.
"""

import asyncio
from collections.abc import Callable
from itertools import count

from msgspec import Struct

from rollart.core.errors import EngineFailed
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest

PULL_S = 20.0  # how long the controller is told, until it asks again


class PullRequest(Struct, frozen=True):
    """A request of an episode, whose caller wants to hear of `every` so many tokens, if not 0. Without a request, its
    caller has given up; or has heard `enough`, and waits for what there is."""

    number: int
    episode: str
    request: GenerationRequest | None = None
    every: int = 0
    enough: bool = False


class PullReply(Struct, frozen=True):
    """An answer, an error, or the next `tokens` of an answer that is being made; `restart`: it begins again."""

    number: int
    completion: Completion | None = None
    error: str = ""
    tokens: list[int] | None = None
    restart: bool = False


class _Open(Struct):
    episode: str
    future: "asyncio.Future[Completion]"
    listener: TokenStream | None
    enough: bool = False


class Upstream:
    def __init__(self) -> None:
        self._numbers = count()
        self._queue: list[PullRequest] = []
        self._tell: Callable[[object], None] | None = None
        self._open: dict[int, _Open] = {}

    async def generate(self, request: GenerationRequest, listener: TokenStream | None = None, /) -> Completion:
        """Raises EngineFailed."""
        number, episode = next(self._numbers), request.episode
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[number] = _Open(episode, future, listener)
        self._put(PullRequest(number, episode, request, listener.every if listener is not None else 0))
        try:
            return await future
        except asyncio.CancelledError:
            self._put(PullRequest(number, episode))
            raise
        finally:
            del self._open[number]

    def _put(self, wanted: PullRequest) -> None:
        if self._tell is not None:
            self._tell(wanted)
        else:
            self._queue.append(wanted)

    async def pull(self, tell: Callable[[object], None]) -> None:
        """Tells of all that waits, and of what comes, for a while. A later call takes over from an earlier one."""
        self._tell = tell
        queue, self._queue = self._queue, []
        for wanted in queue:
            tell(wanted)
        try:
            await asyncio.sleep(PULL_S)
        finally:
            if self._tell is tell:
                self._tell = None

    async def answer(self, given: list[PullReply]) -> None:
        for each in given:
            opened = self._open.get(each.number)
            if opened is None or opened.future.done():
                continue
            if each.completion is not None:
                opened.future.set_result(each.completion)
            elif each.tokens is not None or each.restart:
                self._heard(opened, each)
            else:
                opened.future.set_exception(EngineFailed(each.error))

    def _heard(self, opened: _Open, given: PullReply) -> None:
        assert opened.listener is not None
        try:
            if given.restart:
                opened.listener.on_restart()
                opened.enough = False
            elif not opened.enough and opened.listener.on_tokens(given.tokens or []):
                opened.enough = True
                self._put(PullRequest(given.number, opened.episode, enough=True))
        except Exception as error:  # the listener's own, so it is the one to be told
            opened.future.set_exception(error)
            self._put(PullRequest(given.number, opened.episode))
