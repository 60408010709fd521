"""Gathers calls that are made at the same time into one.

Invariants: at most `parallel` batches are under way, each of at most `size()` items, in the order of the calls; what
comes meanwhile is in the next one, so batches grow with the load and nobody waits for a timer. A caller that is
cancelled only gives up its result.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """`send` returns a result or an exception for each item; what it raises is raised to every caller of the batch."""

    def __init__(
        self,
        send: Callable[[Sequence[T]], Awaitable[Sequence[R | Exception]]],
        size: Callable[[], int],
        parallel: int = 1,
    ) -> None:
        self._send, self._size, self._parallel = send, size, parallel
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def call(self, item: T) -> R:
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if len(self._senders) < self._parallel:
            self._senders.add(asyncio.create_task(self._send_all()))
        return await future

    async def _send_all(self) -> None:
        """Until nothing waits. Its first batch has what is called before the event loop turns."""
        try:
            while self._waiting:
                await self._send_some()
        finally:  # with the last look at what waits, so that no call waits without a sender
            self._senders.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _send_some(self) -> None:
        batch: list[tuple[T, asyncio.Future[R]]] = []
        while self._waiting and len(batch) < self._size():
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        if batch:
            await self._send_batch(batch)

    async def _send_batch(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._send([item for item, _ in batch])
        except Exception as error:
            results = [error] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
