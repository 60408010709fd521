"""The right to one process of a pool, as its holder sees it. The pool keeps the invariants."""

from collections.abc import Mapping
from typing import Any, Protocol

from rollart.workers.seat import Seat
from rollart.workers.slot import Slot, SlotLost


class Pool(Protocol):
    async def slot(self, lease: "Lease", fresh: bool) -> Slot:
        """A process for the lease to hold. Raises SlotLost or ServiceError."""
        ...

    def move(self, lease: "Lease", spare: "Lease") -> None:
        """The lease counts where the spare one was."""
        ...


class Lease:
    """The right to one process. It holds one after `take`, until it is lost, dropped, or the lease ends."""

    def __init__(self, pool: Pool, seat: Seat) -> None:
        self._pool = pool
        self._slot: Slot | None = None
        self.seat: Seat | None = seat  # None while it waits for another
        self.reusable = True  # may another lease have the process after this one?

    @property
    def held(self) -> bool:
        return self._slot is not None and not self._slot.lost

    @property
    def used(self) -> bool:
        """Whether the process that it holds has done anything yet."""
        return self._slot is not None and self._slot.used

    async def take(self, fresh: bool = False) -> None:
        """Hold an idle process or a new one. If `fresh`, surely a new one, and on another host if there is room.
        Raises SlotLost or ServiceError."""
        self.drop()
        self._slot = await self._pool.slot(self, fresh)

    async def call(self, name: str, args: Mapping[str, object], deadline: float) -> Any:
        """Raises SlotLost or CallRaised."""
        if self._slot is None:
            raise SlotLost("the lease holds no process; take one first")
        return await self._slot.call(name, args, deadline)

    def drop(self, reason: str = "it was given up") -> None:
        """End the process that the lease holds, if any."""
        if self._slot is not None:
            self._slot.kill(reason)
            self._slot = None

    def take_over(self, spare: "Lease") -> None:
        """Hold the process of a spare lease of the same pool, in place of our own."""
        self.drop("another was faster")
        self._pool.move(self, spare)
        self._slot, spare._slot = spare._slot, None

    def give_back(self) -> Slot | None:
        """The process that it holds, if that is healthy; the lease holds none any more."""
        slot, self._slot = self._slot, None
        return slot if slot is not None and not slot.lost else None
