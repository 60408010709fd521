"""A pool of slots on one host: leased one by one, reused while healthy, started and ended as needed.

The invariants:
- At most `limit` leases exist; those who wait get one in the order they asked. A lease holds at most one slot, no slot
  is held by two leases, and held and idle slots together are at most `limit`.
- A lease gives its slot back only if the slot is healthy and has no call under way, so no answer meets a later lease.
  However a lease ends, by return, error or cancellation, its place is free again.
- The host is started by the first who needs it and replaced when it has died. With `idle_s`, slots unused for that
  long end, and the host after the last of them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from rollart.errors import RollartError
from rollart.workers.process import HostProcess, HostSpec, Slot, SlotLost

FAREWELL_S = 2.0

logger = logging.getLogger(__name__)


class Lease:
    """The right to one process. It holds one after `take`, until it is lost, dropped, or the lease ends."""

    def __init__(self, pool: "SlotPool") -> None:
        self._pool = pool
        self._slot: Slot | None = None

    @property
    def held(self) -> bool:
        return self._slot is not None and not self._slot.lost

    async def take(self, fresh: bool = False) -> None:
        """Hold an idle process or a new one, surely a new one if `fresh`. Raises SlotLost or ServiceError."""
        self.drop()
        self._slot = await self._pool._slot(fresh)

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

    def _give_back(self) -> Slot | None:
        slot, self._slot = self._slot, None
        return slot if slot is not None and not slot.lost else None


class SlotPool:
    """`farewell` is called in an idle slot before it ends, for what a process should not lose by being killed."""

    def __init__(self, spec: HostSpec, limit: int, idle_s: float | None = None, farewell: str = "") -> None:
        self._spec = spec
        self._limit = limit
        self._idle_s = idle_s
        self._farewell = farewell
        self._places = asyncio.Semaphore(limit)
        self._leases: set[Lease] = set()
        self._idle: list[tuple[float, Slot]] = []  # with the time since when; the last used is at the end
        self._host: HostProcess | None = None
        self._host_lock = asyncio.Lock()
        self._rest: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    @property
    def in_use(self) -> int:
        return len(self._leases)

    @property
    def idle(self) -> int:
        return sum(not slot.lost for _, slot in self._idle)

    @property
    def processes(self) -> int:
        """The host, and the slots held or idle."""
        return (self.host_pid is not None) + self.idle + sum(lease.held for lease in self._leases)

    @property
    def host_pid(self) -> int | None:
        """The host's process id; None while there is no host."""
        return self._host.pid if self._host is not None and self._host.running else None

    async def start(self) -> None:
        """Start the host now, so that what cannot be imported is known now. Raises ServiceError."""
        await self._running_host()
        self._plan_rest()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        async with self._places:
            lease = Lease(self)
            self._leases.add(lease)
            try:
                yield lease
            finally:
                self._leases.discard(lease)
                slot = lease._give_back()
                if slot is not None:
                    self._idle.append((asyncio.get_running_loop().time(), slot))
                    self._plan_rest()

    async def close(self) -> None:
        """End every process within a deadline. Leases that are still out lose theirs."""
        self._closing.set()
        if self._rest is not None:
            await self._rest
        for lease in self._leases:
            lease.drop("the pool was closed")
        idle, self._idle = self._idle, []
        await self._retire([slot for _, slot in idle])
        async with self._host_lock:
            await self._stop_host()

    async def _slot(self, fresh: bool) -> Slot:
        if self._closing.is_set():
            raise SlotLost("the pool is closed")
        while self._idle and not fresh:
            _, slot = self._idle.pop()
            if not slot.lost:
                return slot
        while self._idle and len(self._idle) + len(self._leases) > self._limit:
            self._idle.pop(0)[1].kill("its place was needed")
        host = await self._running_host()
        try:
            return await host.slot()
        except SlotLost:
            if host.running:
                raise
        return await (await self._running_host()).slot()  # the host had died unnoticed

    async def _running_host(self) -> HostProcess:
        async with self._host_lock:
            if self._closing.is_set():
                raise SlotLost("the pool is closed")
            if self._host is None or not self._host.running:
                await self._stop_host()
                host = HostProcess(self._spec)
                await host.start()
                self._host = host
            return self._host

    async def _stop_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            await host.stop()

    def _plan_rest(self) -> None:
        if self._idle_s is not None and (self._rest is None or self._rest.done()) and not self._closing.is_set():
            self._rest = asyncio.create_task(self._scale_down(self._idle_s))

    async def _scale_down(self, idle_s: float) -> None:
        """End what has been idle for long, until there is nothing left to end."""
        clock = asyncio.get_running_loop().time
        while self._host is not None and not self._closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), idle_s / 2)
            old = [slot for since, slot in self._idle if clock() - since >= idle_s]
            self._idle = [(since, slot) for since, slot in self._idle if clock() - since < idle_s]
            await self._retire(old)
            async with self._host_lock:
                if not self._leases and not self._idle and not old:
                    await self._stop_host()

    async def _retire(self, slots: list[Slot]) -> None:
        async def retire(slot: Slot) -> None:
            try:
                if self._farewell and not slot.lost:
                    await slot.call(self._farewell, {}, FAREWELL_S)
            except RollartError as error:
                logger.warning("a worker did not end well: %s", error)
            finally:
                slot.kill("it was idle")

        await asyncio.gather(*(retire(slot) for slot in slots))
