import asyncio
import os
import random
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from rollart.core.errors import ServiceError
from rollart.workers.process import HostSpec
from rollart.workers.slot import CallRaised, SlotLost
from rollart.workers.slots import SlotPool
from rollart.workers.warm import Warmth

TARGET = "hostile_target:Target"
LIMIT = 100_000


@asynccontextmanager
async def pool(limit=2, **options):
    slots = SlotPool(HostSpec(TARGET, message_bytes=LIMIT), limit, **options)
    try:
        yield slots
    finally:
        await slots.close()


async def call(slots, name, deadline=30.0, **args):
    async with slots.lease() as lease:
        await lease.take()
        return await lease.call(name, args, deadline)


async def until(condition):
    while not condition():  # noqa: ASYNC110 (state without an event of its own)
        await asyncio.sleep(0)


def wait_gone(pids):
    """Zombies that nobody reaps here (their new parent is the machine's) count as gone."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            while process.status() != psutil.STATUS_ZOMBIE:
                try:
                    process.wait(timeout=0.05)
                except psutil.TimeoutExpired:
                    continue
        except psutil.NoSuchProcess:
            continue


def children(slots):
    return [child for child in psutil.Process(slots.host_pids[0]).children() if child.status() != psutil.STATUS_ZOMBIE]


def test_an_idle_process_is_used_again():
    async def run():
        async with pool() as slots:
            return [await call(slots, "pid") for _ in range(3)]

    assert len(set(asyncio.run(run()))) == 1


def test_a_fresh_take_is_a_new_process_and_the_limit_holds():
    async def run():
        async with pool(limit=1) as slots:
            old = await call(slots, "pid")
            async with slots.lease() as lease:
                await lease.take(fresh=True)
                new = await lease.call("pid", {}, 30)
            await asyncio.to_thread(wait_gone, [old])
            return old, new, slots.idle

    old, new, idle = asyncio.run(run())
    assert old != new
    assert idle == 1


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("hang", {}, r"`hang` did not answer within 0.2 s; the process was killed"),
        ("exit", {"code": 3}, r"the process ended by itself with exit code 3"),
        ("crash", {}, r"the process was killed by signal 11 \(Segmentation fault\)"),
        ("raw", {"text": "garbage\n"}, r"answered what is not one JSON object"),
        ("raw", {"text": "[1]\n"}, r"answered what is not one JSON object"),
        ("raw", {"text": "[" * 50_000 + "\n"}, r"answered what is not one JSON object"),
        ("raw", {"text": '{"id": 7, "value": 1}\n'}, r"answered what was not asked"),
        ("raw", {"text": '{"id": 2}\n'}, r"answered neither a value nor an error"),
        ("flood", {"size": 3 * LIMIT}, r"answered more than 100,000 bytes"),
    ],
)
def test_a_bad_process_is_lost_with_its_reason_and_the_next_lease_is_well(name, args, reason):
    async def run():
        async with pool(limit=1) as slots:
            first = await call(slots, "pid")
            with pytest.raises(SlotLost, match=reason):
                await call(slots, name, deadline=0.2 if name == "hang" else 30.0, **args)
            await asyncio.to_thread(wait_gone, [first])
            assert await call(slots, "echo", value="well") == "well"

    asyncio.run(run())


def test_a_second_answer_to_one_call_ends_the_process_and_meets_nobody():
    async def run():
        async with pool(limit=1) as slots:
            first = await call(slots, "pid")
            assert await call(slots, "raw", text='{"id": 2, "value": 1}\n{"id": 3, "value": 2}\n') == 1
            await asyncio.to_thread(wait_gone, [first])
            assert await call(slots, "echo", value=3) == 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("fail", {}, r"ValueError: no good \(hostile_target.py, line \d+, in fail\)"),
        ("leave", {}, r"SystemExit: I leave"),
        ("giant", {"size": LIMIT}, r"`giant` answered 100,\d+ bytes, more than the limit of 100,000"),
        ("echo", {"value": "x" * LIMIT}, r"`echo` was given 100,\d+ bytes, more than the limit of 100,000"),
        ("unsendable", {}, r"`unsendable` answered what JSON cannot carry: TypeError: set is not a plain value"),
        ("missing", {}, r"AttributeError"),
    ],
)
def test_a_call_that_raises_leaves_its_process_alive(name, args, reason):
    async def run():
        async with pool(limit=1) as slots:
            first = await call(slots, "pid")
            with pytest.raises(CallRaised, match=reason):
                await call(slots, name, **args)
            assert await call(slots, "pid") == first

    asyncio.run(run())


def test_what_is_printed_never_reaches_the_wire_and_stdin_is_empty():
    async def run():
        async with pool() as slots:
            return await call(slots, "chatter"), await call(slots, "echo", value=5)

    assert asyncio.run(run()) == ("", 5)


def test_what_is_printed_is_kept_in_the_log(tmp_path):
    async def run():
        slots = SlotPool(HostSpec(TARGET, log=tmp_path / "log"), 1)
        try:
            await call(slots, "chatter")
        finally:
            await slots.close()

    asyncio.run(run())
    assert (tmp_path / "log").read_text().count('"value"') == 2


def test_text_that_is_no_unicode_is_mended_on_the_way():
    async def run():
        async with pool() as slots:
            return await call(slots, "surrogate"), await call(slots, "echo", value="ä\n\u2028")

    assert asyncio.run(run()) == ("?", "ä\n\u2028")


def test_leases_are_given_in_the_order_they_were_asked_for():
    async def run():
        order = []

        async def one(slots, number):
            async with slots.lease():
                order.append(number)
                await asyncio.sleep(0)

        async with pool(limit=2) as slots:
            await asyncio.gather(*(one(slots, number) for number in range(20)))
        return order

    assert asyncio.run(run()) == list(range(20))


@pytest.mark.parametrize("seed", range(4))
def test_random_cancellation_leaks_no_slot_and_crosses_no_answer(seed):
    async def user(slots, number, log):
        async with slots.lease() as lease:
            await lease.take()
            for turn in range(5):
                assert await lease.call("echo", {"value": [number, turn]}, 30) == [number, turn]
                log.append(number)

    async def run():
        rng = random.Random(seed)
        log = []
        async with pool(limit=4) as slots:
            await slots.start()
            tasks = [asyncio.create_task(user(slots, number, log)) for number in range(150)]
            for task in tasks:
                if rng.random() < 0.6:
                    asyncio.get_running_loop().call_later(rng.random() * 0.4, task.cancel)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
            assert slots.in_use == 0
            assert slots.idle <= 4
            assert await asyncio.gather(*(call(slots, "echo", value=n) for n in range(8))) == list(range(8))
        return log

    assert len(asyncio.run(run())) >= 5 * 40


def test_a_cancelled_call_ends_its_process_so_its_answer_meets_nobody():
    async def run():
        async with pool(limit=1) as slots:
            first = await call(slots, "pid")
            task = asyncio.create_task(call(slots, "hang"))
            await until(lambda: not slots.idle)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await call(slots, "echo", value=1) == 1
            assert await call(slots, "pid") != first
            await asyncio.to_thread(wait_gone, [first])

    asyncio.run(run())


def test_what_a_process_started_ends_with_it_even_outside_its_group():
    async def run():
        async with pool(limit=1) as slots:
            async with slots.lease() as lease:
                await lease.take()
                pids = await lease.call("breed", {}, 30)
                lease.drop()
            await asyncio.to_thread(wait_gone, pids)
            assert await call(slots, "echo", value=1) == 1
            async with slots.lease() as lease:
                await lease.take()
                pids = await lease.call("breed", {}, 30)
                with pytest.raises(SlotLost, match="exit code 0"):
                    await lease.call("exit", {"code": 0}, 30)
            await asyncio.to_thread(wait_gone, pids)

    asyncio.run(run())


def test_a_killed_host_takes_everything_with_it_and_is_replaced():
    async def run():
        async with pool(limit=2) as slots:
            async with slots.lease() as lease:
                await lease.take()
                pids = await lease.call("breed", {}, 30)
                os.kill(slots.host_pids[0], signal.SIGKILL)
                with pytest.raises(SlotLost, match="its host with it"):
                    await lease.call("hang", {}, 30)
                await lease.take()
                assert await lease.call("echo", {"value": 2}, 30) == 2
            await asyncio.to_thread(wait_gone, pids)

    asyncio.run(run())


def test_nothing_outlives_a_controller_killed_at_once():
    script = Path(__file__).with_name("controller_script.py")
    controller = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 4
    finally:
        controller.kill()
        controller.communicate()
    wait_gone(pids)


def test_closing_ends_every_process_even_those_on_lease():
    async def run():
        async with pool(limit=3) as slots:
            await asyncio.gather(*(call(slots, "echo", value=n) for n in range(3)))
            hanging = asyncio.create_task(call(slots, "hang"))
            await until(lambda: slots.idle < 3)
            pids = [slots.host_pids[0], *(child.pid for child in children(slots))]
            await slots.close()
            with pytest.raises(SlotLost, match="the pool was closed"):
                await hanging
            with pytest.raises(SlotLost, match="the pool is closed"):
                await call(slots, "echo", value=1)
        return pids

    pids = asyncio.run(run())
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_idle_processes_end_and_then_their_host():
    async def run():
        async with pool(limit=4, idle_s=0.05, farewell="pid") as slots:
            for _ in range(2):
                await asyncio.gather(*(call(slots, "echo", value=n) for n in range(4)))
                host = slots.host_pids[0]
                await until(lambda: not slots.host_pids)
                assert slots.idle == 0
                await asyncio.to_thread(wait_gone, [host])

    asyncio.run(run())


def test_two_hundred_processes_at_once_each_keep_their_own_state():
    async def run():
        gate = asyncio.Barrier(200)

        async def one(slots):
            async with slots.lease() as lease:
                await lease.take()
                pid = await lease.call("pid", {}, 60)
                await gate.wait()
                assert await lease.call("pid", {}, 60) == pid
                return pid

        async with pool(limit=200) as slots:
            return await asyncio.gather(*(one(slots) for _ in range(200)))

    assert len(set(asyncio.run(run()))) == 200


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (HostSpec("no_such_module:Target"), "`no_such_module:Target` cannot be imported: ModuleNotFoundError"),
        (HostSpec("hostile_target:Nothing"), "`hostile_target:Nothing` cannot be imported: AttributeError"),
        (HostSpec("/no/such/file.py:Target"), "cannot be imported: FileNotFoundError"),
        (HostSpec(TARGET, python="/no/such/python"), "/no/such/python cannot be run"),
        (HostSpec(TARGET, python="/bin/true"), "/bin/true ended while it started"),
        (HostSpec(TARGET, start_deadline=1e-9), "did not start within 1e-09 s"),
    ],
)
def test_a_host_that_cannot_start_says_why(spec, reason):
    async def run():
        slots = SlotPool(spec, 1)
        try:
            with pytest.raises(ServiceError, match=reason):
                await slots.start()
        finally:
            await slots.close()

    asyncio.run(run())


def test_warm_processes_are_fresh_and_are_replaced_when_taken():
    async def run():
        async with pool(limit=1, warmth=Warmth(2, "echo", {"value": 1})) as slots:
            await slots.start()
            await until(lambda: slots.warm == 2)
            ready = {child.pid for child in children(slots)}
            taken = set()
            for _ in range(2):
                async with slots.lease() as lease:
                    await lease.take(fresh=True)
                    taken.add(await lease.call("pid", {}, 30))
            assert taken == ready
            await until(lambda: slots.warm == 2)
            return slots.processes

    assert asyncio.run(run()) == 1 + 2 + 1


def test_processes_that_cannot_be_made_ready_do_no_harm():
    async def run():
        async with pool(limit=1, warmth=Warmth(2, "fail")) as slots:
            await slots.start()
            assert await call(slots, "echo", value=1) == 1
            assert slots.warm == 0

    asyncio.run(run())


def test_a_lease_that_is_not_reusable_ends_its_process_and_frees_its_place_at_once():
    async def run():
        async with pool(limit=1, farewell="hang", farewell_s=0.2) as slots:
            async with slots.lease() as lease:
                await lease.take()
                first = await lease.call("pid", {}, 30)
                lease.reusable = False
            assert slots.idle == 0
            assert await call(slots, "pid") != first
            await asyncio.to_thread(wait_gone, [first])

    asyncio.run(run())
