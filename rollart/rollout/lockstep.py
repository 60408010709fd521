"""Turn-synchronous rollout, for the `sync` preset: nobody goes on before everybody has arrived."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Lockstep:
    """Invariants: `_members` are the trajectories that take part; a wave is released when all of them wait, or when the
    last one that did not wait leaves; a trajectory that joins late takes part from the current wave on."""

    def __init__(self) -> None:
        self._members = 0
        self._waiting: list[asyncio.Future[None]] = []

    @contextmanager
    def member(self) -> Iterator[None]:
        self._members += 1
        try:
            yield
        finally:
            self._members -= 1
            self._release_if_complete()

    async def arrive(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._release_if_complete()
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def _release_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._members:
            wave, self._waiting = self._waiting, []
            for future in wave:
                if not future.done():
                    future.set_result(None)
