import asyncio
import contextlib
import random
from contextlib import asynccontextmanager

import psutil
import pytest

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed, ServiceError
from rollart.core.types import Message, Step
from rollart.envs.pool import EnvironmentPool
from rollart.workers import pool as process_pool

QUICK = EnvironmentsConfig(processes=4, reset_deadline=20, step_deadline=20, retries=1)


@asynccontextmanager
async def pool(*tasks, config=QUICK):
    environments = EnvironmentPool(tasks, config)
    try:
        yield environments
    finally:
        await environments.close()


@asynccontextmanager
async def claimed(task, config=QUICK):
    async with pool(task, config=config) as environments, environments.claim(task.name, held_out=False) as environment:
        yield environment


def task(env, name="t", **args):
    return TaskConfig(name=name, env=f"hostile_envs:{env}", args=args)


def test_a_text_observation_is_one_user_message_and_a_tuple_is_a_step():
    async def run():
        async with claimed(task("Plain", answers=[["next", 0.5, False], ["bye", None, True]])) as environment:
            return await environment.reset(1), await environment.step("a"), await environment.step("b")

    first, second, third = asyncio.run(run())
    assert first == (Message("user", "hello"),)
    assert second == Step((Message("user", "next"),), 0.5)
    assert third == Step((Message("user", "bye"),), None, done=True)


def test_the_environment_object_is_kept_for_the_next_claim_but_not_across_held_out():
    async def who(environments, held_out):
        async with environments.claim("t", held_out) as environment:
            await environment.reset(7)
            return (await environment.step("who")).messages[0].content.split()

    async def run():
        async with pool(task("Plain"), config=EnvironmentsConfig(processes=1)) as environments:
            return [await who(environments, held_out) for held_out in (False, False, True)]

    first, second, third = asyncio.run(run())
    assert first[0] == second[0] == third[0]
    assert [first[1], second[1], third[1]] == ["1", "2", "1"]
    assert [first[2], third[2]] == ["False", "True"]
    assert first[3] == second[3] == str(random.Random(7).random())


def test_a_reset_is_retried_on_a_fresh_process(tmp_path):
    async def run():
        async with claimed(task("Bad", what="once", marker=str(tmp_path / "tried"))) as environment:
            return await environment.reset(1)

    assert asyncio.run(run()) == (Message("user", "ready"),)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("hang", "could not be reset in 2 tries; the last: `reset` did not return within 0.3 s"),
        ("exit", "could not be reset in 2 tries; the last: the process ended by itself with exit code 9"),
        ("raise", "could not be reset in 2 tries; the last: KeyError: 'lost'"),
    ],
)
def test_an_environment_that_never_resets_fails_after_the_retries(what, reason):
    async def run():
        config = EnvironmentsConfig(processes=2, reset_deadline=0.3 if what == "hang" else 20, retries=1)
        async with claimed(task("Bad", what=what), config=config) as environment:
            with pytest.raises(EnvironmentFailed, match=reason):
                await environment.reset(1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("what", "reason"),
    [("hang", "`step` did not return within 0.3 s"), ("exit", "exit code 9"), ("raise", "KeyError: 'lost'")],
)
def test_a_failed_step_is_final_until_the_next_reset_and_blocks_nobody(what, reason):
    async def run():
        config = EnvironmentsConfig(processes=1, step_deadline=0.3 if what == "hang" else 20)
        async with pool(task("Bad", what=f"step:{what}"), task("Plain", "other"), config=config) as environments:
            async with environments.claim("t", held_out=False) as environment:
                await environment.reset(1)
                with pytest.raises(EnvironmentFailed, match=reason):
                    await environment.step("a")
                with pytest.raises(EnvironmentFailed, match="has no process"):
                    await environment.step("b")
                assert await environment.reset(2) == (Message("user", "ready"),)
            async with environments.claim("other", held_out=False) as environment:
                assert await environment.reset(1)

    asyncio.run(run())


def test_the_pool_counts_its_claims_and_its_capacity():
    async def run():
        async with pool(task("Plain"), task("Plain", "other")) as environments:
            async with environments.claim("t", held_out=False), environments.claim("other", held_out=True):
                held = environments.in_use
            return held, environments.in_use, environments.capacity

    assert asyncio.run(run()) == (2, 0, 8)


def test_an_invalid_reply_is_a_failure_with_a_reason():
    async def run():
        async with claimed(task("Plain", answers=[["x", "much", False]])) as environment:
            await environment.reset(1)
            with pytest.raises(EnvironmentFailed, match=r"`reward` is 'much' \(str\); expected a number"):
                await environment.step("a")

    asyncio.run(run())


def test_what_the_arguments_of_a_task_name_is_imported_before_its_processes_are_forked_if_it_can_be():
    async def run():
        wrapper = task("Wrapper", inner="crashing_env:Crashing", other="no_such:Thing", text="12:30", number=3)
        async with claimed(wrapper) as environment:
            return (await environment.reset(1))[0].content

    assert asyncio.run(run()) == "True"


def test_an_environment_that_cannot_be_imported_fails_at_the_start_and_names_its_task():
    async def run():
        async with pool(task("Plain"), task("Missing", "bad")) as environments:
            with pytest.raises(ServiceError, match=r"of task 'bad' cannot start: `hostile_envs:Missing` cannot be"):
                await environments.start()

    asyncio.run(run())


def test_idle_environments_are_closed_properly_at_the_end(tmp_path):
    async def run():
        async with claimed(task("Closing", marker=str(tmp_path / "closed"))) as environment:
            await environment.reset(1)

    asyncio.run(run())
    assert (tmp_path / "closed").exists()


def test_a_task_that_has_lost_its_last_host_fails_at_once_and_the_others_go_on(monkeypatch):
    monkeypatch.setattr(process_pool, "RESTARTS", 0)

    def kill(environments, name):
        psutil.Process(environments._tasks[name].pool.host_pids[0]).kill()

    async def until_lost(environments):
        while True:
            async with environments.claim("lost", held_out=False) as environment:
                with contextlib.suppress(EnvironmentFailed):  # the loss is not known yet
                    await environment.reset(1)

    async def run():
        async with pool(task("Plain", "lost"), task("Plain", "sound")) as environments, asyncio.timeout(60):
            await environments.start()
            watching = asyncio.create_task(environments.watch())
            kill(environments, "lost")
            with pytest.raises(EnvironmentFailed, match="'lost' has no environment: no host of lost environments"):
                await until_lost(environments)
            async with environments.claim("sound", held_out=False) as environment:
                assert await environment.reset(1)
            assert not watching.done()
            kill(environments, "sound")
            with pytest.raises(ServiceError, match=r"no host of lost .* no host of sound"):
                await watching

    asyncio.run(run())
