"""A pool of slots on one or more hosts: leased one by one, reused while healthy, started and ended as needed.

The invariants:
- At most `limit` leases exist, split over the hosts; those who wait get one in the order they asked. A lease holds at
  most one slot, no slot is held by two leases, and held and idle slots together are at most `limit`. Beside these there
  are at most `spares` spare leases, which take nothing from those who wait, and the slots kept warm.
- A lease gives its slot back only if the slot is healthy and has no call under way, so no answer meets a later lease.
  However a lease ends, by return, error or cancellation, its place is free again.
- A host is started by the first who needs it. One that dies loses its slots and is replaced, on another node if its own
  went silent, at most `RESTARTS` times in a row; meanwhile its leases move to other hosts as these have room, and its
  share goes to them if it cannot be replaced. When no host is left, everybody is told why.
- With `idle_s`, slots unused for that long end, and a host after the last of its own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import chain
from typing import Any, NoReturn

from rollart.core.errors import RollartError, ServiceError
from rollart.launch.launcher import ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers.lease import Lease
from rollart.workers.process import HostSpec, Place
from rollart.workers.seat import Seat, Tell
from rollart.workers.seating import Seating
from rollart.workers.slot import Slot, SlotLost
from rollart.workers.warm import Warmth

FAREWELL_S = 2.0
RESTARTS, BACK_OFF_S, HEALTHY_S = 5, 1.0, 60.0
TRIES = 3  # hosts that one `take` may find dead

logger = logging.getLogger(__name__)


class SlotPool:
    """`places` are where its hosts run, one each; by default one on this machine. `farewell` is called in a healthy
    slot before it ends, for what a process should not lose by being killed, and may take `farewell_s`. `spares` is how
    many spare leases there may be. `tell` hears of each host that started, and again, with the reason, when it died."""

    def __init__(
        self,
        spec: HostSpec,
        limit: int,
        idle_s: float | None = None,
        farewell: str = "",
        places: Sequence[Place] = (),
        tell: Tell | None = None,
        farewell_s: float = FAREWELL_S,
        spares: int = 0,
        warmth: Warmth | None = None,
    ) -> None:
        self._spec = spec
        self._idle_s = idle_s
        self._farewell, self._farewell_s = farewell, farewell_s
        self._tell = tell
        self._warmth = warmth or Warmth()
        self._leases: set[Lease] = set()
        self._spare_count, self._spares = spares, set[Lease]()
        self._background: set[asyncio.Task[None]] = set()
        self._rest: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._given_up = asyncio.Event()
        self._replacing: set[asyncio.Task[None]] = set()
        self._seating = Seating(limit, self._warmth.count)
        for place in places or [Place(LocalLauncher(), ResourceRequest())]:
            self._seating.add(self._seat(place))

    def _seat(self, place: Place) -> Seat:
        return Seat(self._spec, place, self._tell, self._died, self._warmth)

    @property
    def in_use(self) -> int:
        return len(self._leases)

    @property
    def idle(self) -> int:
        return sum(not slot.lost for seat in self._seating.seats for _, slot in seat.idle)

    @property
    def warm(self) -> int:
        return sum(len(seat.warm) for seat in self._seating.seats)

    @property
    def processes(self) -> int:
        """The hosts, and the slots held, idle or warm."""
        held = sum(lease.held for lease in self._leases | self._spares)
        return len(self.host_pids) + self.idle + self.warm + held

    @property
    def host_pids(self) -> list[int]:
        """Of those that run, on their nodes."""
        return [seat.host.started.pid for seat in self._seating.seats if seat.host is not None and seat.up]

    async def start(self) -> None:
        """Start the hosts now, so that what cannot be imported is known now. Raises ServiceError."""
        starts = (seat.start() for seat in self._seating.seats if seat.share)
        results = await asyncio.gather(*starts, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._plan_rest()

    async def add(self, place: Place) -> None:
        """One more host, which takes over its share. Raises ServiceError."""
        seat = self._seat(place)
        await seat.start()
        if self._closing.is_set() or self._given_up.is_set():
            await seat.stop()
        else:
            self._seating.add(seat)
            seat.warm.fill()

    async def watch(self) -> NoReturn:
        """Wait until no host is left. Raises ServiceError with the last one's reason."""
        await self._given_up.wait()
        raise ServiceError(str(self._seating.over))

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Lease]:
        """Raises SlotLost or ServiceError when there is no host any more."""
        lease = Lease(self, await self._seating.sit())
        self._leases.add(lease)
        try:
            yield lease
        finally:
            self._leases.discard(lease)
            slot = lease.give_back()
            if slot is not None and not lease.reusable:
                self._beside(self._retire([slot]))  # its place is free at once, however long it takes to end
            if lease.seat is not None:
                if slot is not None and lease.reusable:
                    lease.seat.give_back(slot)
                    self._plan_rest()
                self._seating.leave(lease.seat)

    @contextmanager
    def spare(self, first: Lease) -> Iterator[Lease | None]:
        """A lease beside the limit, on another host than the `first` if there is one. Its process ends with it,
        unless the first took it over. None while as many as may be are out."""
        seat = self._seating.spare(first.seat)
        if self._closing.is_set() or len(self._spares) >= self._spare_count or seat is None:
            yield None
            return
        lease = Lease(self, seat)
        self._spares.add(lease)
        try:
            yield lease
        finally:
            self._spares.discard(lease)
            lease.drop("another was faster")

    async def close(self) -> None:
        """End every process within a deadline. Leases that are still out lose theirs."""
        self._closing.set()
        self._seating.end(SlotLost("the pool is closed"))
        if self._rest is not None:
            await self._rest
        for lease in self._leases | self._spares:
            lease.drop("the pool was closed")
        for replacing in self._replacing:
            replacing.cancel()
        await asyncio.gather(*self._replacing, *self._background, return_exceptions=True)
        seats = self._seating.seats
        warm = await asyncio.gather(*(seat.warm.drain() for seat in seats))
        await self._retire([*chain(*warm), *(slot for seat in seats for _, slot in seat.idle)])
        await asyncio.gather(*(seat.stop() for seat in seats))

    # For leases

    async def slot(self, lease: Lease, fresh: bool) -> Slot:
        """A process for the lease to hold. Raises SlotLost or ServiceError."""
        for number in range(TRIES):
            seat = await self._seated(lease, elsewhere=fresh)
            try:
                return await seat.slot(fresh)
            except SlotLost:
                if seat.open or number + 1 == TRIES:
                    raise
        raise AssertionError("unreachable")

    async def _seated(self, lease: Lease, elsewhere: bool) -> Seat:
        """The seat of a lease; another one if its host is gone, or for a change if there is room."""
        if self._closing.is_set():
            raise SlotLost("the pool is closed")
        seat = lease.seat
        if lease in self._spares:
            if seat is None or not seat.open:
                raise SlotLost("its host is gone")
            return seat
        if seat is not None and seat.open:
            other = self._seating.best(besides=seat) if elsewhere else None
            if other is None:
                return seat
            self._seating.move(seat, other)
            lease.seat = other
            return other
        if seat is not None:
            lease.seat = None
            self._seating.leave(seat)
        lease.seat = await self._seating.sit(first=True)
        return lease.seat

    def move(self, lease: Lease, spare: Lease) -> None:
        """The lease counts where the spare one, which did not count, was."""
        if spare.seat is not None and spare.seat is not lease.seat:
            spare.seat.leases += 1
            if lease.seat is not None:
                self._seating.leave(lease.seat)
            lease.seat = spare.seat

    # Hosts that die

    def _died(self, seat: Seat, reason: str) -> None:
        if self._closing.is_set():
            return
        task = asyncio.create_task(self._replace(seat, reason))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, seat: Seat, reason: str) -> None:
        if seat.age >= HEALTHY_S:
            seat.restarts = 0
        while seat.restarts < RESTARTS:
            if seat.restarts:
                await asyncio.sleep(BACK_OFF_S * 2 ** (seat.restarts - 1))
            seat.restarts += 1
            try:
                await seat.replace()
            except ServiceError as error:
                reason = str(error)
            else:
                self._seating.wake()
                return
        logger.warning("%s is given up after %d tries: %s", self._spec.name, seat.restarts, reason)
        self._seating.remove(seat)
        await seat.stop()
        if not self._seating.seats:
            self._seating.end(ServiceError(f"no {self._spec.name} is left; the last: {reason}"))
            self._given_up.set()

    # Slots that are not needed

    def _plan_rest(self) -> None:
        if self._idle_s is not None and (self._rest is None or self._rest.done()) and not self._closing.is_set():
            self._rest = asyncio.create_task(self._scale_down(self._idle_s))

    async def _scale_down(self, idle_s: float) -> None:
        """End what has been idle for long, until there is nothing left to end."""
        clock = asyncio.get_running_loop().time
        while self.host_pids and not self._closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), idle_s / 2)
            for seat in self._seating.seats:
                old = [slot for since, slot in seat.idle if clock() - since >= idle_s]
                seat.idle = [(since, slot) for since, slot in seat.idle if clock() - since < idle_s]
                await self._retire(old)
                if seat.open and not seat.leases and not seat.idle and not old:
                    await seat.stop()

    async def _retire(self, slots: list[Slot]) -> None:
        async def retire(slot: Slot) -> None:
            try:
                if self._farewell and not slot.lost:
                    await slot.call(self._farewell, {}, self._farewell_s)
            except RollartError as error:
                logger.warning("a worker did not end well: %s", error)
            finally:
                slot.kill("it is not needed any more")

        await asyncio.gather(*(retire(slot) for slot in slots))

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
