"""Turn-synchronous rollout, for the `sync` preset: nobody goes on before everybody of its task has arrived.

By task, because what is stepped as one batch are environments of one kind: a task of many short turns does not wait for
the long answers of another.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Waves:
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


class Lockstep:
    """The waves of every task."""

    def __init__(self) -> None:
        self._tasks: defaultdict[str, Waves] = defaultdict(Waves)

    def of(self, task: str) -> Waves:
        return self._tasks[task]
