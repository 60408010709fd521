import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollart.core.errors import ServiceError
from rollart.launch.launcher import ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers.process import HostSpec, Place
from rollart.workers.seat import Seat
from rollart.workers.seating import Seating, split


def seating(limit, *weights):
    """Seats whose hosts nobody starts."""
    made = Seating(limit)
    for weight in weights:
        place = Place(LocalLauncher(()), ResourceRequest(count=weight))
        made.add(Seat(HostSpec("nobody:Nothing"), place, None, lambda seat, reason: None))
    return made


@given(st.integers(0, 500), st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
def test_shares_are_whole_and_nearly_in_proportion(total, weights):
    shares = split(total, weights)
    assert sum(shares) == total
    assert all(abs(share - total * weight / sum(weights)) < 1 for share, weight in zip(shares, weights, strict=True))


def test_a_place_is_given_where_most_room_is():
    async def run():
        made = seating(4, 3, 1)
        return [(await made.sit()).share for _ in range(4)]

    assert asyncio.run(run()) == [3, 3, 3, 1]


def test_a_new_seat_takes_over_its_share_and_a_lost_one_leaves_its_own():
    async def run():
        made = seating(6, 1, 1)
        first, second = made.seats
        made.add(Seat(HostSpec("nobody:Nothing"), first.place, None, lambda seat, reason: None))
        grown = [seat.share for seat in made.seats]
        made.remove(second)
        return grown, [seat.share for seat in made.seats]

    assert asyncio.run(run()) == ([2, 2, 2], [3, 3])


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["sit", "sit", "leave", "cancel", "leave and cancel", "close", "open"]), max_size=60),
    st.integers(1, 6),
)
def test_places_are_never_given_twice_nor_kept_from_those_who_wait(actions, limit):
    async def run():
        made = seating(limit, 2, 1)
        order, waiting, sitting = [], [], []

        async def sit(number):
            seat = await made.sit()
            order.append(number)
            sitting.append(seat)

        for number, action in enumerate(actions):
            if action == "sit":
                waiting.append(asyncio.create_task(sit(number)))
            if action.startswith("leave") and sitting:
                made.leave(sitting.pop(0))
            if action.endswith("cancel") and waiting:  # perhaps in the moment when it gets a place
                waiting[number % len(waiting)].cancel()
            if action in ("close", "open"):
                made.seats[0].open = action == "open"
                made.wake()
            for _ in range(4):  # until everybody has heard
                await asyncio.sleep(0)
        assert order == sorted(order)
        assert sum(seat.leases for seat in made.seats) == len(sitting)
        assert all(seat.leases <= seat.share for seat in made.seats)
        left = [task for task in waiting if not task.done()]
        assert not left or made.best() is None
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(run())


def test_at_the_end_everybody_who_waits_is_told_why():
    async def run():
        made = seating(1, 1)
        await made.sit()
        waiting = asyncio.create_task(made.sit())
        await asyncio.sleep(0)
        made.end(ServiceError("the last host is gone"))
        for late in (waiting, made.sit()):
            with pytest.raises(ServiceError, match="the last host is gone"):
                await late

    asyncio.run(run())
