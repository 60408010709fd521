"""Pools on several hosts, some of which can only be reached through a port."""

import asyncio
import os
import signal
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import psutil
import pytest

from rollart.core.errors import ServiceError
from rollart.launch.launcher import ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers import pool as pool_module
from rollart.workers.host_handle import HostHandle, HostLocation, HostSpec
from rollart.workers.pool import ProcessPool
from rollart.workers.worker_process import ProcessLost

SPEC = HostSpec("hostile_target:Target")


class RemoteLauncher(LocalLauncher):
    """This machine, used as if it were another one. Starts `starts` commands and then no more."""

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
    locations = [HostLocation(launcher, ResourceRequest()) for launcher in launchers]
    workers = ProcessPool(SPEC, limit, locations=locations, **options)
    try:
        async with asyncio.timeout(60):
            await workers.start()
            yield workers
    finally:
        await workers.close()


async def parent(claim):
    return psutil.Process(await claim.call("pid", {}, 30)).ppid()


async def claims(stack, workers, count):
    made = [await stack.enter_async_context(workers.claim()) for _ in range(count)]
    await asyncio.gather(*(claim.acquire() for claim in made))
    return made


async def until(condition):
    while not condition():  # noqa: ASYNC110 (state without an event of its own)
        await asyncio.sleep(0)


def test_claims_are_spread_over_the_hosts():
    async def run():
        async with pool(LocalLauncher(()), RemoteLauncher()) as workers, AsyncExitStack() as stack:
            parents = [await parent(claim) for claim in await claims(stack, workers, 4)]
            assert sorted(parents) == sorted(2 * workers.host_pids)

    asyncio.run(run())


@pytest.mark.parametrize("key", [b"wrong\n", b"\n", "schlüssel\n".encode()])
def test_a_port_is_of_no_use_without_the_key(key):
    async def run():
        host = HostHandle(SPEC, HostLocation(RemoteLauncher(), ResourceRequest()))
        await host.start()
        try:
            reader, writer = await asyncio.open_connection(*host._address)
            writer.write(key + b'{"id": 1, "call": "pid", "args": {}}\n')
            try:
                said = await asyncio.wait_for(reader.read(), 30)
            except ConnectionResetError:  # it does not read what follows the key
                said = b""
            writer.close()
            process = await host.fork()
            assert await process.call("echo", {"value": 1}, 30) == 1
            process.kill("enough")
        finally:
            await host.stop()
        return said

    assert asyncio.run(run()) == b""


def test_a_killed_host_is_replaced_while_its_claims_move_to_other_hosts():
    changes = []

    async def run():
        launchers = LocalLauncher(()), RemoteLauncher()
        async with (
            pool(*launchers, on_host_change=lambda *what: changes.append(what)) as workers,
            AsyncExitStack() as stack,
        ):
            first, second = await claims(stack, workers, 2)
            killed, stays = await parent(first), await parent(second)
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(ProcessLost, match="its host with it"):
                await first.call("hang", {}, 30)
            assert await second.call("echo", {"value": 1}, 30) == 1
            await first.acquire()
            assert await parent(first) != killed
            await until(lambda: len(workers.host_pids) == 2)
            assert killed not in workers.host_pids
            assert stays in workers.host_pids

    asyncio.run(run())
    assert [reason is None for _, reason in changes] == [True, True, False, True]
    assert "SIGKILL" in changes[2][1] or "host" in changes[2][1]


def test_a_fresh_process_is_taken_on_another_host():
    async def run():
        async with pool(RemoteLauncher(), RemoteLauncher()) as workers, workers.claim() as claim:
            await claim.acquire()
            before = await parent(claim)
            await claim.acquire(fresh=True)
            assert await parent(claim) != before

    asyncio.run(run())


def test_the_others_take_over_the_share_of_a_host_that_cannot_come_back(monkeypatch):
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.001)

    async def run():
        async with pool(LocalLauncher(()), RemoteLauncher(starts=1)) as workers, AsyncExitStack() as stack:
            os.kill(workers.host_pids[1], signal.SIGKILL)
            made = await claims(stack, workers, 4)
            assert {await parent(claim) for claim in made} == set(workers.host_pids)
            assert len(workers.host_pids) == 1

    asyncio.run(run())


def test_a_host_elsewhere_that_is_back_after_many_attempts_has_its_share_again(monkeypatch):
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.001)

    class Rebooting(RemoteLauncher):
        refusals = 0

        async def launch(self, command, request):
            if self.refusals:
                self.refusals -= 1
                raise ServiceError("its node is not back yet")
            return await super().launch(command, request)

    async def run():
        launcher = Rebooting()
        async with pool(LocalLauncher(()), launcher) as workers, AsyncExitStack() as stack:
            launcher.refusals = 4 * pool_module.RESTARTS
            os.kill(workers.host_pids[1], signal.SIGKILL)
            await until(lambda: len(workers.host_pids) == 1)
            await until(lambda: len(workers.host_pids) == 2)
            made = await claims(stack, workers, 4)
            return Counter([await parent(claim) for claim in made]), launcher.refusals

    shares, left = asyncio.run(run())
    assert list(shares.values()) == [2, 2] and left == 0


def test_when_no_host_is_left_every_claim_fails_with_the_reason(monkeypatch):
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.001)

    async def run():
        async with pool(RemoteLauncher(starts=1)) as workers, workers.claim() as claim:
            await claim.acquire()
            watching = asyncio.create_task(workers.watch())
            os.kill(workers.host_pids[0], signal.SIGKILL)
            with pytest.raises(ProcessLost):
                await claim.call("hang", {}, 30)
            for lost in (claim.acquire(), watching, workers.claim().__aenter__()):
                with pytest.raises(ServiceError, match="no worker host is left; the last: the cluster is full"):
                    await lost

    asyncio.run(run())


def test_a_host_that_is_added_gets_its_share():
    async def run():
        async with pool(LocalLauncher(())) as workers, AsyncExitStack() as stack:
            await workers.add(HostLocation(RemoteLauncher(), ResourceRequest()))
            made = await claims(stack, workers, 4)
            parents = [await parent(claim) for claim in made]
            assert sorted(parents) == sorted(2 * workers.host_pids)
            waiting = asyncio.create_task(claims(stack, workers, 1))
            await asyncio.sleep(0)
            assert not waiting.done()  # four in all, as before
            waiting.cancel()

    asyncio.run(run())


def test_nothing_stays_behind_when_a_pool_closes_while_it_replaces_a_host():
    async def run():
        launcher = RemoteLauncher()
        async with pool(launcher) as workers:
            os.kill(workers.host_pids[0], signal.SIGKILL)
            await until(lambda: not workers.host_pids)
        return launcher

    launcher = asyncio.run(run())
    assert not launcher._children


def test_a_spare_claim_is_on_another_host_and_makes_nobody_wait():
    async def run():
        async with pool(RemoteLauncher(), RemoteLauncher(), limit=2, spares=1) as workers, AsyncExitStack() as stack:
            first, second = await claims(stack, workers, 2)
            with workers.spare_claim(first) as spare, workers.spare_claim(first) as none:
                assert none is None
                await spare.acquire()
                assert await parent(spare) == await parent(second) != await parent(first)
                kept = await spare.call("pid", {}, 30)
                first.take_over(spare)
                assert not spare.has_process
            assert await first.call("pid", {}, 30) == kept
            waiting = asyncio.create_task(claims(stack, workers, 1))
            await asyncio.sleep(0)
            assert workers.in_use == 2  # as many as may be, though the first host has room
            await stack.aclose()
            [third] = await waiting
            assert await third.call("echo", {"value": 1}, 30) == 1
            await stack.aclose()
            assert [host.claims for host in workers._queue.hosts] == [0, 0]

    asyncio.run(run())
