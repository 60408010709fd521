"""One host of a pool, and the slots on it.

The invariants:
- A seat is open while leases may be placed on it: its host runs, or will be started by the first who needs it. It
  closes when its host dies, which is told once, and opens again when another has taken the host's place.
- Slots held and idle are at most `share`, which the pool may change; what is held too much then ends when it is given
  back. Warm ones, never used yet, and those of spare leases are beside that.
"""

import asyncio
from collections.abc import Callable

from rollart.launch.launcher import ServiceHandle
from rollart.workers.process import HostProcess, HostSpec, Place
from rollart.workers.slot import Slot, SlotLost
from rollart.workers.warm import WarmSlots, Warmth

Tell = Callable[[ServiceHandle, str | None], None]


class Seat:
    """`tell` hears of each host that started, and again, with the reason, when it died; `died` only of the latter."""

    def __init__(
        self,
        spec: HostSpec,
        place: Place,
        tell: Tell | None,
        died: Callable[["Seat", str], None],
        warmth: Warmth | None = None,
    ) -> None:
        self._spec = spec
        self._tell = tell or (lambda started, reason: None)
        self._died = died
        self._lock = asyncio.Lock()
        self._began = 0.0
        self._last: ServiceHandle | None = None
        self.host: HostProcess | None = None
        self.place = place
        self.share = 0
        self.leases = 0
        self.idle: list[tuple[float, Slot]] = []  # with the time since when; the last used is at the end
        self.warm = WarmSlots(warmth or Warmth(), self._warm_slot)
        self.open = True
        self.restarts = 0  # in a row

    @property
    def room(self) -> int:
        return self.share - self.leases if self.open else 0

    @property
    def up(self) -> bool:
        return self.host is not None and self.host.running

    @property
    def age(self) -> float:
        """Seconds since its last host started."""
        return asyncio.get_running_loop().time() - self._began

    async def start(self) -> HostProcess:
        """Its host, started if there is none. Raises ServiceError."""
        async with self._lock:
            return self.host or await self._start()

    async def replace(self) -> None:
        """End the host that died, start another, and open. Raises ServiceError."""
        async with self._lock:
            await self._stop()
            await self._start()
            self.open = True

    async def stop(self) -> None:
        async with self._lock:
            await self._stop()

    async def _start(self) -> HostProcess:
        host = HostProcess(self._spec, self.place)
        await host.start(instead_of=self._last)
        self.host, self._last, self._began = host, host.started, asyncio.get_running_loop().time()
        host.ended.add_done_callback(lambda ended: None if ended.cancelled() else self._lost(host, ended.result()))
        self._tell(host.started, None)
        self.warm.fill()
        return host

    async def _stop(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            await host.stop()

    def _lost(self, host: HostProcess, reason: str) -> None:
        if self.host is host and self.open:  # neither ended by us nor told already
            self.open = False
            self._tell(host.started, reason)
            self._died(self, reason)

    async def slot(self, fresh: bool) -> Slot:
        """An idle slot, or a new one if `fresh` or there is none. Raises SlotLost or ServiceError."""
        while self.idle and not fresh:
            _, slot = self.idle.pop()
            if not slot.lost:
                return slot
        self._make_room()
        if (warm := self.warm.take()) is not None:
            return warm
        host = await self.start()
        try:
            return await host.slot()
        except SlotLost as error:
            if not host.running:
                self._lost(host, str(error))
            raise

    async def _warm_slot(self) -> Slot | None:
        return await self.host.slot() if self.open and self.host is not None and self.host.running else None

    def resize(self, share: int) -> None:
        self.share = share
        self._make_room()

    def _make_room(self) -> None:
        while self.idle and len(self.idle) + self.leases > self.share:
            self.idle.pop(0)[1].kill("its place was needed")

    def give_back(self, slot: Slot) -> None:
        """By a lease that ends right after."""
        if self.open and self.leases <= self.share:
            self.idle.append((asyncio.get_running_loop().time(), slot))
        else:
            slot.kill("its place was given up")
