"""Second resets, warm processes and fresh ones, with real processes."""

import asyncio
from contextlib import asynccontextmanager

import psutil
import pytest

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed
from rollart.core.events import ResetHedged
from rollart.envs.latencies import MIN_CALLS
from rollart.envs.pool import EnvironmentPool
from rollart.workers import worker_process

SLOW = 99


class Sink(list):
    emit = list.append


@asynccontextmanager
async def pool(env, config, sink=None, **args):
    environments = EnvironmentPool([TaskConfig(name="t", env=f"hostile_envs:{env}", args=args)], config, sink=sink)
    try:
        async with asyncio.timeout(60):
            await environments.start()
            yield environments
    finally:
        await environments.close()


async def learn(environments):
    async with environments.claim("t", held_out=False) as environment:
        for seed in range(MIN_CALLS):
            await environment.reset(seed)


async def until(condition):
    while not condition():  # noqa: ASYNC110 (state without an event of its own)
        await asyncio.sleep(0)


def pids(folder):
    return [int(path.name) for path in folder.iterdir()]


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def processes(environments):
    host = psutil.Process(environments._tasks["t"].pool.host_pids[0])
    return [child for child in host.children() if not gone(child.pid)]


def test_a_slow_reset_is_raced_by_a_second_one_even_if_every_process_is_claimed(tmp_path):
    async def run():
        config = EnvironmentsConfig(processes=1, hedges=1, warm=0, reset_deadline=50)
        async with pool("Stuck", config, folder=str(tmp_path), seed=SLOW) as environments:
            await learn(environments)
            async with environments.claim("t", held_out=False) as environment:
                [message] = await environment.reset(SLOW)
                [loser] = pids(tmp_path)
                await until(lambda: gone(loser))
                assert message.content != str(loser)
                assert (await environment.step("who")).messages[0].content == message.content
            assert environments.in_use == 0
            async with environments.claim("t", held_out=False) as environment:
                assert (await environment.reset(1))[0].content == message.content  # the winner is used again
            return environments.counts["t"]

    counts = asyncio.run(run())
    assert (counts.hedges, counts.hedges_won, counts.hedges_lost) == (1, 1, 0)
    assert counts.retries == counts.failed_tries == 0


def test_without_hedges_a_slow_reset_runs_into_its_deadline_and_is_retried(tmp_path):
    async def run():
        config = EnvironmentsConfig(processes=1, hedges=0, warm=0, reset_deadline=3)
        async with pool("Stuck", config, folder=str(tmp_path), seed=SLOW) as environments:
            async with environments.claim("t", held_out=False) as environment:
                await environment.reset(SLOW)
            return environments.counts["t"]

    counts = asyncio.run(run())
    assert (counts.hedges, counts.failed_tries, counts.retries, counts.failed_resets) == (0, 1, 1, 0)


def test_when_both_resets_hang_both_end_and_the_reset_is_retried(tmp_path):
    sink = Sink()

    async def run():
        config = EnvironmentsConfig(processes=1, hedges=1, warm=0, reset_deadline=3, retries=1)
        async with pool("Stuck", config, sink, folder=str(tmp_path), seed=SLOW, times=2) as environments:
            await learn(environments)
            async with environments.claim("t", held_out=False) as environment:
                await environment.reset(SLOW)
            await until(lambda: all(map(gone, pids(tmp_path))))
            return environments.counts["t"]

    counts = asyncio.run(run())
    assert (counts.hedges, counts.hedges_won, counts.failed_tries, counts.retries) == (1, 0, 2, 1)
    hedged, lost = sink
    assert hedged == ResetHedged(task="t", won=False)
    assert (lost.call, lost.retried) == ("reset", True) and "did not return within 3 s" in lost.reason


def test_a_cancelled_race_leaves_neither_process_nor_claim_behind(tmp_path):
    async def run():
        config = EnvironmentsConfig(processes=1, hedges=1, warm=0, reset_deadline=50)
        async with pool("Stuck", config, folder=str(tmp_path), seed=SLOW, times=2) as environments:
            await learn(environments)

            async def play():
                async with environments.claim("t", held_out=False) as environment:
                    await environment.reset(SLOW)

            playing = asyncio.create_task(play())
            await until(lambda: len(pids(tmp_path)) == 2)
            playing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await playing
            await until(lambda: sum(not gone(pid) for pid in pids(tmp_path)) <= config.processes)
            assert environments.in_use == 0
            await learn(environments)

    asyncio.run(run())


def test_second_resets_are_limited(tmp_path):
    async def run():
        config = EnvironmentsConfig(processes=3, hedges=1, warm=0, reset_deadline=4, retries=0)
        async with pool("Stuck", config, folder=str(tmp_path), seed=SLOW, times=100) as environments:
            await learn(environments)

            async def play():
                async with environments.claim("t", held_out=False) as environment:
                    with pytest.raises(EnvironmentFailed):
                        await environment.reset(SLOW)

            await asyncio.gather(*(play() for _ in range(3)))
            return environments.counts["t"]

    counts = asyncio.run(run())
    assert counts.hedges < 3
    assert counts.failed_tries == len(pids(tmp_path)) == 3 + counts.hedges


def test_an_environment_that_does_not_declare_itself_reusable_gets_a_fresh_process_and_is_closed(tmp_path):
    async def run():
        async with pool("Single", EnvironmentsConfig(processes=1, warm=0), folder=str(tmp_path)) as environments:
            seen = []
            for seed in range(3):
                async with environments.claim("t", held_out=False) as environment:
                    seen.append((await environment.reset(seed))[0].content.split())
                    seen.append((await environment.reset(seed))[0].content.split())
            await until(lambda: len(processes(environments)) == 0)
            return seen

    seen = asyncio.run(run())
    assert len({pid for pid, _ in seen}) == 6
    assert {made for _, made in seen} == {"1"}
    # What was reset twice within a claim was killed; what a claim ended with was closed.
    assert {str(pid) for pid in pids(tmp_path)} == {pid for pid, _ in seen[1::2]}


@pytest.mark.parametrize(("env", "kept"), [("Lingering", True), ("LingeringOnce", False)])
def test_a_cancelled_step_costs_a_reusable_environment_its_object_and_another_its_process(
    env, kept, tmp_path, monkeypatch
):
    monkeypatch.setattr(worker_process, "INTERRUPT_S", 60)

    async def cancelled(environments, seed):
        async with environments.claim("t", held_out=False) as environment:
            await environment.reset(seed)
            who = (await environment.step("who")).messages[0].content.split()
            task = asyncio.create_task(environment.step("stay"))
            await until((tmp_path / "marker").exists)
            task.cancel()
            await asyncio.wait([task])
            (tmp_path / "marker").unlink()
            return who

    async def run():
        config = EnvironmentsConfig(processes=1, warm=0)
        async with pool(env, config, first=str(tmp_path / "marker")) as environments:
            return [await cancelled(environments, seed) for seed in range(3)]

    seen = asyncio.run(run())
    assert {resets for _, resets, *_ in seen} == {"1"}
    assert len({pid for pid, *_ in seen}) == (1 if kept else 3)


def test_a_hanging_close_blocks_nobody_and_is_killed_at_its_deadline(tmp_path):
    async def run():
        config = EnvironmentsConfig(processes=1, warm=0, close_deadline=0.3)
        async with pool("Single", config, folder=str(tmp_path), hang=True) as environments:
            for seed in range(3):
                async with environments.claim("t", held_out=False) as environment:
                    await environment.reset(seed)
            await until(lambda: len(pids(tmp_path)) == 3 and all(map(gone, pids(tmp_path))))

    asyncio.run(run())


def test_warm_environments_are_made_before_they_are_needed(tmp_path):
    async def run():
        async with pool("Single", EnvironmentsConfig(processes=1, warm=2), folder=str(tmp_path)) as environments:
            warm = environments._tasks["t"].pool
            await until(lambda: warm.warm == 2)
            ready = {str(process.pid) for process in processes(environments)}
            assert environments.in_use == 0
            async with environments.claim("t", held_out=False) as environment:
                assert (await environment.reset(1))[0].content.split()[0] in ready
                await until(lambda: warm.warm == 2)
                assert len(processes(environments)) == 3

    asyncio.run(run())
    assert len(pids(tmp_path)) == 3  # each was closed, used or not
