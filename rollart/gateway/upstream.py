"""Generation that somebody else does: the controller, which asks for work and answers it.

The controller has the router and is the one who connects, so requests wait here until it pulls them, many at a time.

The invariants: a request is pulled once; it is answered, or its caller gives up, which the controller is told in the
same queue; an answer that nobody waits for any more is dropped.
"""

import asyncio
from itertools import count

from msgspec import Struct

from rollart.errors import EngineFailed
from rollart.types import Completion, GenerationRequest

PULL_S = 20.0  # a pull that finds nothing answers so


class Wanted(Struct, frozen=True):
    """A request of an episode; without one, its caller has given up."""

    number: int
    episode: str
    request: GenerationRequest | None = None


class Given(Struct, frozen=True):
    number: int
    completion: Completion | None = None
    error: str = ""


class Upstream:
    def __init__(self) -> None:
        self._numbers = count()
        self._queue: list[Wanted] = []
        self._there = asyncio.Event()
        self._open: dict[int, asyncio.Future[Completion]] = {}

    async def generate(self, request: GenerationRequest) -> Completion:
        """Raises EngineFailed."""
        number, episode = next(self._numbers), request.id.rpartition("/")[0]
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        self._put(Wanted(number, episode, request))
        try:
            return await future
        except asyncio.CancelledError:
            self._put(Wanted(number, episode))
            raise
        finally:
            del self._open[number]

    def _put(self, wanted: Wanted) -> None:
        self._queue.append(wanted)
        self._there.set()

    async def pull(self) -> list[Wanted]:
        """All that waits; nothing, after a while without any."""
        try:
            async with asyncio.timeout(PULL_S):
                while not self._queue:
                    self._there.clear()
                    await self._there.wait()
        except TimeoutError:
            return []
        pulled, self._queue = self._queue, []
        return pulled

    async def answer(self, given: list[Given]) -> None:
        for each in given:
            future = self._open.get(each.number)
            if future is None or future.done():
                continue
            if each.completion is not None:
                future.set_result(each.completion)
            else:
                future.set_exception(EngineFailed(each.error))
