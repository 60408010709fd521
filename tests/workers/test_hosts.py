"""Pools on several hosts, some of which can only be reached through a port."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import psutil
import pytest

from rollart.core.errors import ServiceError
from rollart.launch.launcher import ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers import slots as slots_module
from rollart.workers.process import HostProcess, HostSpec, Place
from rollart.workers.slot import SlotLost
from rollart.workers.slots import SlotPool

SPEC = HostSpec("hostile_target:Target")


class Elsewhere(LocalLauncher):
    """This machine as another one would be used. Starts `starts` commands and then no more."""

    here = False

    def __init__(self, starts=1000):
        super().__init__(())
        self.starts = starts

    async def launch(self, command, request):
        self.starts -= 1
        if self.starts < 0:
            raise ServiceError("the cluster is full")
        return await super().launch(command, request)


@asynccontextmanager
async def pool(*launchers, limit=4, **options):
    places = [Place(launcher, ResourceRequest()) for launcher in launchers]
    slots = SlotPool(SPEC, limit, places=places, **options)
    try:
        async with asyncio.timeout(60):
            await slots.start()
            yield slots
    finally:
        await slots.close()


async def parent(lease):
    return psutil.Process(await lease.call("pid", {}, 30)).ppid()


async def leases(stack, slots, count):
    made = [await stack.enter_async_context(slots.lease()) for _ in range(count)]
    await asyncio.gather(*(lease.take() for lease in made))
    return made


async def until(condition):
    while not condition():  # noqa: ASYNC110 (state without an event of its own)
        await asyncio.sleep(0)


def test_leases_are_spread_over_the_hosts():
    async def run():
        async with pool(LocalLauncher(()), Elsewhere()) as slots, AsyncExitStack() as stack:
            parents = [await parent(lease) for lease in await leases(stack, slots, 4)]
            assert sorted(parents) == sorted(2 * slots.host_pids)

    asyncio.run(run())


@pytest.mark.parametrize("key", [b"wrong\n", b"\n", "schlüssel\n".encode()])
def test_a_port_is_of_no_use_without_the_key(key):
    async def run():
        host = HostProcess(SPEC, Place(Elsewhere(), ResourceRequest()))
        await host.start()
        try:
            reader, writer = await asyncio.open_connection(*host._address)
            writer.write(key + b'{"id": 1, "call": "pid", "args": {}}\n')
            said = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            slot = await host.slot()
            assert await slot.call("echo", {"value": 1}, 30) == 1
            slot.kill("enough")
        finally:
            await host.stop()
        return said

    said = asyncio.run(run())
    assert b'"value"' not in said
    assert b"exit code 1" in said


def test_a_killed_host_is_replaced_while_its_leases_go_on_elsewhere():
    told = []

    async def run():
        launchers = LocalLauncher(()), Elsewhere()
        async with pool(*launchers, tell=lambda *what: told.append(what)) as slots, AsyncExitStack() as stack:
            first, second = await leases(stack, slots, 2)
            killed, stays = await parent(first), await parent(second)
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(SlotLost, match="its host with it"):
                await first.call("hang", {}, 30)
            assert await second.call("echo", {"value": 1}, 30) == 1
            await first.take()
            assert await parent(first) != killed
            await until(lambda: len(slots.host_pids) == 2)
            assert killed not in slots.host_pids
            assert stays in slots.host_pids

    asyncio.run(run())
    assert [reason is None for _, reason in told] == [True, True, False, True]
    assert "SIGKILL" in told[2][1] or "host" in told[2][1]


def test_a_fresh_process_is_taken_on_another_host():
    async def run():
        async with pool(Elsewhere(), Elsewhere()) as slots, slots.lease() as lease:
            await lease.take()
            before = await parent(lease)
            await lease.take(fresh=True)
            assert await parent(lease) != before

    asyncio.run(run())


def test_the_others_take_over_the_share_of_a_host_that_cannot_come_back(monkeypatch):
    monkeypatch.setattr(slots_module, "BACK_OFF_S", 0.001)

    async def run():
        async with pool(LocalLauncher(()), Elsewhere(starts=1)) as slots, AsyncExitStack() as stack:
            os.kill(slots.host_pids[1], signal.SIGKILL)
            made = await leases(stack, slots, 4)
            assert {await parent(lease) for lease in made} == set(slots.host_pids)
            assert len(slots.host_pids) == 1

    asyncio.run(run())


def test_when_no_host_is_left_everybody_is_told(monkeypatch):
    monkeypatch.setattr(slots_module, "BACK_OFF_S", 0.001)

    async def run():
        async with pool(Elsewhere(starts=1)) as slots, slots.lease() as lease:
            await lease.take()
            watching = asyncio.create_task(slots.watch())
            os.kill(slots.host_pids[0], signal.SIGKILL)
            with pytest.raises(SlotLost):
                await lease.call("hang", {}, 30)
            for lost in (lease.take(), watching, slots.lease().__aenter__()):
                with pytest.raises(ServiceError, match="no worker host is left; the last: the cluster is full"):
                    await lost

    asyncio.run(run())


def test_a_host_that_is_added_gets_its_share():
    async def run():
        async with pool(LocalLauncher(())) as slots, AsyncExitStack() as stack:
            await slots.add(Place(Elsewhere(), ResourceRequest()))
            made = await leases(stack, slots, 4)
            parents = [await parent(lease) for lease in made]
            assert sorted(parents) == sorted(2 * slots.host_pids)
            waiting = asyncio.create_task(leases(stack, slots, 1))
            await asyncio.sleep(0)
            assert not waiting.done()  # four in all, as before
            waiting.cancel()

    asyncio.run(run())


def test_nothing_stays_behind_when_a_pool_closes_while_it_replaces_a_host():
    async def run():
        launcher = Elsewhere()
        async with pool(launcher) as slots:
            os.kill(slots.host_pids[0], signal.SIGKILL)
            await until(lambda: not slots.host_pids)
        return launcher

    launcher = asyncio.run(run())
    assert not launcher._started


def test_a_spare_lease_is_on_another_host_and_takes_no_place_from_those_who_wait():
    async def run():
        async with pool(Elsewhere(), Elsewhere(), limit=2, spares=1) as slots, AsyncExitStack() as stack:
            first, second = await leases(stack, slots, 2)
            with slots.spare(first) as spare, slots.spare(first) as none:
                assert none is None
                await spare.take()
                assert await parent(spare) == await parent(second) != await parent(first)
                kept = await spare.call("pid", {}, 30)
                first.take_over(spare)
                assert not spare.held
            assert await first.call("pid", {}, 30) == kept
            waiting = asyncio.create_task(leases(stack, slots, 1))
            await asyncio.sleep(0)
            assert slots.in_use == 2  # as many as may be, though the first host has room
            await stack.aclose()
            [third] = await waiting
            assert await third.call("echo", {"value": 1}, 30) == 1
            await stack.aclose()
            assert [seat.leases for seat in slots._seating.seats] == [0, 0]

    asyncio.run(run())
