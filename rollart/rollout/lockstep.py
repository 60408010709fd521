"""Turn-synchronous rollout, for the `sync` preset: a barrier that all trajectories of a task pass together.

One barrier per task, because environments are stepped as one batch per kind: a task of many short turns does not wait
for the long completions of another.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class TurnBarrier:
    """Invariants: `_members` counts the trajectories that take part; the barrier opens when all of them wait, or when
    the last one that does not wait leaves; a trajectory that joins late takes part at once."""

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
            self._open_if_complete()

    async def wait(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._open_if_complete()
        try:
            await future
        finally:
            if future in self._waiting:
                self._waiting.remove(future)

    def _open_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._members:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


class Lockstep:
    """The barrier of every task."""

    def __init__(self) -> None:
        self._barriers: defaultdict[str, TurnBarrier] = defaultdict(TurnBarrier)

    def barrier(self, task: str) -> TurnBarrier:
        return self._barriers[task]
