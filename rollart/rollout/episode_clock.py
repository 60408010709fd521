"""The time that an episode may take. It stands still while a request of the episode waits for an engine: an outage is
no fault of the episode, and lasts as long as the owner of the engines tries to bring one back."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class EpisodeClock:
    """`waited_s` are the seconds in which it stood still."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.waited_s = seconds, 0.0
        self._timeout: asyncio.Timeout | None = None  # within `limit`
        self._waiting, self._since, self._left = 0, 0.0, 0.0

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises TimeoutError once the time is used up."""
        try:
            async with asyncio.timeout(self.seconds) as self._timeout:
                yield
        finally:
            self._timeout = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Requests of one episode may wait at the same time: the clock goes on when none does."""
        self._waiting += 1
        if self._waiting == 1:
            self._stop()
        try:
            yield
        finally:
            self._waiting -= 1
            if self._waiting == 0:
                self._go_on()

    def _stop(self) -> None:
        self._since = asyncio.get_running_loop().time()
        if self._timeout is not None and (when := self._timeout.when()) is not None and not self._timeout.expired():
            self._left = when - self._since
            self._timeout.reschedule(None)

    def _go_on(self) -> None:
        now = asyncio.get_running_loop().time()
        self.waited_s += now - self._since
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(now + self._left)
