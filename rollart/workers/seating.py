"""Who sits where: places on the hosts of a pool, given in the order they were asked for.

The invariants: a place is given on the open seat with most room, on one whose host runs if there is any; nobody waits
while there is room, and at most `limit` places are given, even if a seat has more than its share because a lease moved
there; once `over`, everybody is refused with the same error.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from rollart.core.errors import RollartError
from rollart.workers.seat import Seat


class Seating:
    def __init__(self, limit: int, warm: int = 0) -> None:
        self._limit = limit
        self._warm = warm
        self._waiting: deque[asyncio.Future[Seat]] = deque()
        self.seats: list[Seat] = []
        self.over: RollartError | None = None

    def add(self, seat: Seat) -> None:
        self.seats.append(seat)
        self._share_out()

    def remove(self, seat: Seat) -> None:
        """Its share goes to the others."""
        self.seats.remove(seat)
        self._share_out()

    def _share_out(self) -> None:
        weights = [seat.place.request.count for seat in self.seats]
        shares, warm = split(self._limit, weights), split(self._warm, weights)
        for seat, share, count in zip(self.seats, shares, warm, strict=True):
            seat.warm.count = count
            seat.resize(share)
        self.wake()

    def best(self, besides: Seat | None = None) -> Seat | None:
        free = [seat for seat in self.seats if seat.room > 0 and seat is not besides]
        return max(free, key=lambda seat: (seat.up, seat.room), default=None)

    def spare(self, first: Seat | None) -> Seat | None:
        """An open seat for a lease that counts nowhere; not that of the `first` if there is any other."""
        seats = [seat for seat in self.seats if seat.open]
        return max(seats, key=lambda seat: (seat is not first, seat.up, seat.room), default=None)

    async def sit(self, first: bool = False) -> Seat:
        """Wait for a place, `first` before all who wait already. Raises what `end` was told."""
        if self.over is not None:
            raise self.over
        place: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if first else self._waiting.append)(place)
        self.wake()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(place.result())  # given in the same moment
            raise

    def move(self, seat: Seat, other: Seat) -> None:
        other.leases += 1
        self.leave(seat)

    def leave(self, seat: Seat) -> None:
        seat.leases -= 1
        self.wake()

    def wake(self) -> None:
        """Give away what is free."""
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            seat = self.best()
            if seat is None or sum(seat.leases for seat in self.seats) >= self._limit:
                return
            seat.leases += 1
            self._waiting.popleft().set_result(seat)

    def end(self, error: RollartError) -> None:
        self.over = error
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_exception(error)


def split(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares in proportion to the weights."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    most_left = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in most_left[: total - sum(shares)]:
        shares[index] += 1
    return shares
