import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.errors import ServiceError
from rollart.launch.launcher import ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers.claim_queue import ClaimQueue, split
from rollart.workers.host_handle import HostLocation, HostSpec
from rollart.workers.pool_host import PoolHost


def host(weight):
    """One that is never started."""
    location = HostLocation(LocalLauncher(()), ResourceRequest(count=weight))
    return PoolHost(HostSpec("nobody:Nothing"), location, None, lambda host, reason: None)


def queue_of(limit, *weights):
    queue = ClaimQueue(limit)
    for weight in weights:
        queue.add(host(weight))
    return queue


@given(st.integers(0, 500), st.lists(st.floats(0.1, 100), min_size=1, max_size=20))
def test_shares_are_whole_and_nearly_in_proportion(total, weights):
    shares = split(total, weights)
    assert sum(shares) == total
    assert all(abs(share - total * weight / sum(weights)) < 1 for share, weight in zip(shares, weights, strict=True))


def test_a_claim_goes_to_the_host_with_most_free_processes():
    async def run():
        queue = queue_of(4, 3, 1)
        return [(await queue.acquire()).share for _ in range(4)]

    assert asyncio.run(run()) == [3, 3, 3, 1]


def test_an_added_host_takes_over_its_share_and_a_removed_one_leaves_its_own():
    async def run():
        queue = queue_of(6, 1, 1)
        _, second = queue.hosts
        queue.add(host(1))
        grown = [host.share for host in queue.hosts]
        queue.remove(second)
        return grown, [host.share for host in queue.hosts]

    assert asyncio.run(run()) == ([2, 2, 2], [3, 3])


@given(
    st.lists(
        st.sampled_from(["acquire", "acquire", "release", "cancel", "release and cancel", "die", "restart"]),
        max_size=60,
    ),
    st.integers(1, 6),
)
def test_claims_never_exceed_the_shares_nor_wait_while_a_host_has_room(actions, limit):
    async def run():
        queue = queue_of(limit, 2, 1)
        order, waiting, claimed = [], [], []

        async def acquire(number):
            host = await queue.acquire()
            order.append(number)
            claimed.append(host)

        for number, action in enumerate(actions):
            if action == "acquire":
                waiting.append(asyncio.create_task(acquire(number)))
            if action.startswith("release") and claimed:
                queue.release(claimed.pop(0))
            if action.endswith("cancel") and waiting:  # perhaps in the moment when it is assigned
                waiting[number % len(waiting)].cancel()
            if action in ("die", "restart"):
                queue.hosts[0].available = action == "restart"
                queue.dispatch()
            for _ in range(4):  # until all tasks have run
                await asyncio.sleep(0)
        assert order == sorted(order)
        assert sum(host.claims for host in queue.hosts) == len(claimed)
        assert all(host.claims <= host.share for host in queue.hosts)
        left = [task for task in waiting if not task.done()]
        assert not left or queue.best_host() is None
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    asyncio.run(run())


def test_a_closed_queue_fails_all_that_wait_or_come_later():
    async def run():
        queue = queue_of(1, 1)
        await queue.acquire()
        waiting = asyncio.create_task(queue.acquire())
        await asyncio.sleep(0)
        queue.close(ServiceError("the last host is gone"))
        for late in (waiting, queue.acquire()):
            with pytest.raises(ServiceError, match="the last host is gone"):
                await late

    asyncio.run(run())
