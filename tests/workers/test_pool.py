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
from rollart.workers import worker_process
from rollart.workers.host_handle import HostSpec
from rollart.workers.pool import ProcessPool
from rollart.workers.pool_host import Prewarm
from rollart.workers.worker_process import CallRaised, ProcessLost

TARGET = "hostile_target:Target"
LIMIT = 100_000


@asynccontextmanager
async def pool(limit=2, **options):
    workers = ProcessPool(HostSpec(TARGET, message_bytes=LIMIT), limit, **options)
    try:
        yield workers
    finally:
        await workers.close()


async def call(workers, name, deadline=30.0, **args):
    async with workers.claim() as claim:
        await claim.acquire()
        return await claim.call(name, args, deadline)


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


def children(workers):
    return [
        child for child in psutil.Process(workers.host_pids[0]).children() if child.status() != psutil.STATUS_ZOMBIE
    ]


def test_an_idle_process_is_used_again():
    async def run():
        async with pool() as workers:
            return [await call(workers, "pid") for _ in range(3)]

    assert len(set(asyncio.run(run()))) == 1


def test_fresh_means_a_new_process_and_the_limit_holds():
    async def run():
        async with pool(limit=1) as workers:
            old = await call(workers, "pid")
            async with workers.claim() as claim:
                await claim.acquire(fresh=True)
                new = await claim.call("pid", {}, 30)
            await asyncio.to_thread(wait_gone, [old])
            return old, new, workers.idle

    old, new, idle = asyncio.run(run())
    assert old != new
    assert idle == 1


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("hang", {}, r"`hang` did not return within 0.2 s; the process was killed"),
        ("exit", {"code": 3}, r"the process ended by itself with exit code 3"),
        ("crash", {}, r"the process was killed by signal 11 \(Segmentation fault\)"),
        ("raw", {"text": "garbage\n"}, r"sent what is not one JSON object"),
        ("raw", {"text": "[1]\n"}, r"sent what is not one JSON object"),
        ("raw", {"text": "[" * 50_000 + "\n"}, r"sent what is not one JSON object"),
        ("raw", {"text": '{"id": 7, "value": 1}\n'}, r"sent a reply to no call"),
        ("raw", {"text": '{"id": 2}\n'}, r"sent neither a value nor an error"),
        ("flood", {"size": 3 * LIMIT}, r"sent more than 100,000 bytes"),
    ],
)
def test_a_bad_process_is_lost_with_its_reason_and_the_next_claim_is_well(name, args, reason):
    async def run():
        async with pool(limit=1) as workers:
            first = await call(workers, "pid")
            with pytest.raises(ProcessLost, match=reason):
                await call(workers, name, deadline=0.2 if name == "hang" else 30.0, **args)
            await asyncio.to_thread(wait_gone, [first])
            assert await call(workers, "echo", value="well") == "well"

    asyncio.run(run())


def test_a_second_reply_to_one_call_ends_the_process_and_reaches_no_later_call():
    async def run():
        async with pool(limit=1) as workers:
            first = await call(workers, "pid")
            assert await call(workers, "raw", text='{"id": 2, "value": 1}\n{"id": 3, "value": 2}\n') == 1
            await asyncio.to_thread(wait_gone, [first])
            assert await call(workers, "echo", value=3) == 3

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("fail", {}, r"ValueError: no good \(hostile_target.py, line \d+, in fail\)"),
        ("leave", {}, r"SystemExit: I leave"),
        ("giant", {"size": LIMIT}, r"`giant` returned 100,\d+ bytes; the limit is 100,000"),
        ("echo", {"value": "x" * LIMIT}, r"the arguments of `echo` have 100,\d+ bytes; the limit is 100,000"),
        ("unsendable", {}, r"`unsendable` returned what JSON cannot carry: TypeError: set is not a plain value"),
        ("missing", {}, r"AttributeError"),
    ],
)
def test_a_call_that_raises_leaves_its_process_alive(name, args, reason):
    async def run():
        async with pool(limit=1) as workers:
            first = await call(workers, "pid")
            with pytest.raises(CallRaised, match=reason):
                await call(workers, name, **args)
            assert await call(workers, "pid") == first

    asyncio.run(run())


def test_printed_text_never_reaches_the_connection_and_stdin_is_empty():
    async def run():
        async with pool() as workers:
            return await call(workers, "chatter"), await call(workers, "echo", value=5)

    assert asyncio.run(run()) == ("", 5)


def test_printed_text_is_kept_in_the_log(tmp_path):
    async def run():
        workers = ProcessPool(HostSpec(TARGET, log=tmp_path / "log"), 1)
        try:
            await call(workers, "chatter")
        finally:
            await workers.close()

    asyncio.run(run())
    assert (tmp_path / "log").read_text().count('"value"') == 2


def test_text_that_is_not_unicode_is_repaired_on_the_way():
    async def run():
        async with pool() as workers:
            return await call(workers, "surrogate"), await call(workers, "echo", value="ä\n\u2028")

    assert asyncio.run(run()) == ("?", "ä\n\u2028")


def test_claims_are_granted_in_the_order_they_were_requested():
    async def run():
        order = []

        async def one(workers, number):
            async with workers.claim():
                order.append(number)
                await asyncio.sleep(0)

        async with pool(limit=2) as workers:
            await asyncio.gather(*(one(workers, number) for number in range(20)))
        return order

    assert asyncio.run(run()) == list(range(20))


@pytest.mark.parametrize("interruptible", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_cancellation_leaks_no_process_and_mixes_up_no_replies(seed, interruptible):
    async def user(workers, number, log):
        async with workers.claim() as claim:
            claim.interruptible = interruptible
            await claim.acquire()
            for turn in range(5):
                assert await claim.call("echo", {"value": [number, turn]}, 30) == [number, turn]
                log.append(number)

    async def run():
        rng = random.Random(seed)
        log = []
        async with pool(limit=4, close_call="close") as workers:
            await workers.start()
            tasks = [asyncio.create_task(user(workers, number, log)) for number in range(150)]
            for task in tasks:
                if rng.random() < 0.6:
                    asyncio.get_running_loop().call_later(rng.random() * 0.4, task.cancel)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
            assert workers.in_use == 0
            assert workers.idle <= 4
            assert await asyncio.gather(*(call(workers, "echo", value=n) for n in range(8))) == list(range(8))
        return log

    assert len(asyncio.run(run())) >= 5 * 40


def test_a_cancelled_call_ends_its_process_so_its_reply_reaches_no_later_call():
    async def run():
        async with pool(limit=1) as workers:
            first = await call(workers, "pid")
            task = asyncio.create_task(call(workers, "hang"))
            await until(lambda: not workers.idle)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await call(workers, "echo", value=1) == 1
            assert await call(workers, "pid") != first
            await asyncio.to_thread(wait_gone, [first])

    asyncio.run(run())


async def interrupted(workers, how, marker):
    """Cancel a call that is under way. The process that it was made in, and the children of that."""
    async with workers.claim() as claim:
        claim.interruptible = True
        await claim.acquire()
        pid = await claim.call("pid", {}, 30)
        task = asyncio.create_task(claim.call("linger", {"how": how, "marker": str(marker)}, 30))
        await until(marker.exists)
        pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not claim.has_process
        return pids


def test_an_interrupted_call_leaves_its_process_to_the_next_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "INTERRUPT_S", 60)

    async def run():
        async with pool(limit=1, close_call="close") as workers:
            pid = await call(workers, "pid")
            for number in range(3):
                assert await interrupted(workers, "plainly", tmp_path / str(number)) == [pid]
            assert await call(workers, "echo", value=1) == 1
            assert await call(workers, "pid") == pid

    asyncio.run(run())


def test_an_interruption_that_comes_before_its_call_has_begun_or_after_it_returned_does_no_harm(monkeypatch):
    monkeypatch.setattr(worker_process, "INTERRUPT_S", 60)

    async def run():
        async with pool(limit=1, close_call="close") as workers:
            pid = await call(workers, "pid")
            for turns in range(200):
                async with workers.claim() as claim:
                    claim.interruptible = True
                    await claim.acquire()
                    task = asyncio.create_task(claim.call("echo", {"value": turns}, 30))
                    for _ in range(turns // 10):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                assert await call(workers, "echo", value=-turns) == -turns
            assert await call(workers, "pid") == pid

    asyncio.run(run())


@pytest.mark.parametrize("how", ["swallowing", "breeding", "threading", "importing", "computing"])
def test_a_process_in_which_something_outlives_the_interruption_is_ended_and_the_next_claim_is_well(
    how, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker_process, "INTERRUPT_S", 0.2 if how in ("swallowing", "computing") else 60)

    async def run():
        async with pool(limit=1, close_call="close") as workers:
            await workers.start()
            pids = await interrupted(workers, how, tmp_path / "marker")
            assert len(pids) == (2 if how == "breeding" else 1)
            assert await call(workers, "pid") != pids[0]
            await asyncio.to_thread(wait_gone, pids)

    asyncio.run(run())


def test_closing_waits_for_no_interruption_longer_than_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "INTERRUPT_S", 0.2)

    async def run():
        async with pool(limit=1, close_call="close") as workers:
            pids = await interrupted(workers, "swallowing", tmp_path / "marker")
        await asyncio.to_thread(wait_gone, pids)

    asyncio.run(run())


def test_what_a_process_started_ends_with_it_even_outside_its_group():
    async def run():
        async with pool(limit=1) as workers:
            async with workers.claim() as claim:
                await claim.acquire()
                pids = await claim.call("breed", {}, 30)
                claim.kill()
            await asyncio.to_thread(wait_gone, pids)
            assert await call(workers, "echo", value=1) == 1
            async with workers.claim() as claim:
                await claim.acquire()
                pids = await claim.call("breed", {}, 30)
                with pytest.raises(ProcessLost, match="exit code 0"):
                    await claim.call("exit", {"code": 0}, 30)
            await asyncio.to_thread(wait_gone, pids)

    asyncio.run(run())


def test_a_killed_host_takes_everything_with_it_and_is_replaced():
    async def run():
        async with pool(limit=2) as workers:
            async with workers.claim() as claim:
                await claim.acquire()
                pids = await claim.call("breed", {}, 30)
                os.kill(workers.host_pids[0], signal.SIGKILL)
                with pytest.raises(ProcessLost, match="its host with it"):
                    await claim.call("hang", {}, 30)
                await claim.acquire()
                assert await claim.call("echo", {"value": 2}, 30) == 2
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


def test_closing_ends_every_process_even_claimed_ones():
    async def run():
        async with pool(limit=3) as workers:
            await asyncio.gather(*(call(workers, "echo", value=n) for n in range(3)))
            hanging = asyncio.create_task(call(workers, "hang"))
            await until(lambda: workers.idle < 3)
            pids = [workers.host_pids[0], *(child.pid for child in children(workers))]
            await workers.close()
            with pytest.raises(ProcessLost, match="the pool was closed"):
                await hanging
            with pytest.raises(ProcessLost, match="the pool is closed"):
                await call(workers, "echo", value=1)
        return pids

    pids = asyncio.run(run())
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_idle_processes_end_and_then_their_host():
    async def run():
        async with pool(limit=4, idle_s=0.05, close_call="pid") as workers:
            for _ in range(2):
                await asyncio.gather(*(call(workers, "echo", value=n) for n in range(4)))
                host = workers.host_pids[0]
                await until(lambda: not workers.host_pids)
                assert workers.idle == 0
                await asyncio.to_thread(wait_gone, [host])

    asyncio.run(run())


def test_two_hundred_processes_at_once_each_keep_their_own_state():
    async def run():
        gate = asyncio.Barrier(200)

        async def one(workers):
            async with workers.claim() as claim:
                await claim.acquire()
                pid = await claim.call("pid", {}, 60)
                await gate.wait()
                assert await claim.call("pid", {}, 60) == pid
                return pid

        async with pool(limit=200) as workers:
            return await asyncio.gather(*(one(workers) for _ in range(200)))

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
        workers = ProcessPool(spec, 1)
        try:
            with pytest.raises(ServiceError, match=reason):
                await workers.start()
        finally:
            await workers.close()

    asyncio.run(run())


def test_warm_processes_are_fresh_and_are_replaced_when_taken():
    async def run():
        async with pool(limit=1, prewarm=Prewarm(2, "echo", {"value": 1})) as workers:
            await workers.start()
            await until(lambda: workers.warm == 2)
            ready = {child.pid for child in children(workers)}
            taken = set()
            for _ in range(2):
                async with workers.claim() as claim:
                    await claim.acquire(fresh=True)
                    taken.add(await claim.call("pid", {}, 30))
            assert taken == ready
            await until(lambda: workers.warm == 2)
            return workers.processes

    assert asyncio.run(run()) == 1 + 2 + 1


def test_processes_that_cannot_be_prepared_do_no_harm():
    async def run():
        async with pool(limit=1, prewarm=Prewarm(2, "fail")) as workers:
            await workers.start()
            assert await call(workers, "echo", value=1) == 1
            assert workers.warm == 0

    asyncio.run(run())


def test_a_claim_that_is_not_reusable_ends_its_process_and_makes_room_at_once():
    async def run():
        async with pool(limit=1, close_call="hang", close_s=0.2) as workers:
            async with workers.claim() as claim:
                await claim.acquire()
                first = await claim.call("pid", {}, 30)
                claim.reusable = False
            assert workers.idle == 0
            assert await call(workers, "pid") != first
            await asyncio.to_thread(wait_gone, [first])

    asyncio.run(run())
