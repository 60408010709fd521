"""Light environments: many episodes in one process, none lost with it."""

import asyncio

import pytest
from test_env_pool import pool, task

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed
from rollart.core.events import EnvironmentLost
from rollart.envs.pool import EnvironmentPool

CONFIG = EnvironmentsConfig(processes=6, reset_deadline=20, step_deadline=20, retries=1)


async def text(environment, action):
    return (await environment.step(action)).messages[0].content


def together(environments, count, play):
    """`play(number, environment)` in `count` episodes that are all under way at once."""
    ready = asyncio.Barrier(count)

    async def one(number):
        async with environments.claim("t", held_out=False) as environment:
            await environment.reset(number)
            await ready.wait()
            return await play(number, environment)

    return asyncio.gather(*(one(number) for number in range(count)), return_exceptions=True)


def test_episodes_of_a_light_environment_share_a_process_and_nothing_else():
    async def run():
        async def play(number, environment):
            for _ in range(number):
                await text(environment, "more")
            return (await text(environment, "who")).split(" in ")

        async with pool(task("Light"), config=CONFIG) as environments:
            return await together(environments, 6, play)

    played = asyncio.run(run())
    assert [state for state, _ in played] == [f"{number}: {number + 1}" for number in range(6)]
    assert len({pid for _, pid in played}) == 1


def test_the_task_may_refuse_to_share():
    async def run():
        async with EnvironmentPoolOf(isolation="process") as environments:
            return await together(environments, 3, lambda number, environment: text(environment, "who"))

    assert len({who.split(" in ")[1] for who in asyncio.run(run())}) == 3


class EnvironmentPoolOf:
    """A pool of `Light` whose events are kept."""

    def __init__(self, isolation="auto", config=CONFIG, **args):
        light = TaskConfig(name="t", env="hostile_envs:Light", args=args, isolation=isolation)
        self.events = []
        self.pool = EnvironmentPool([light], config, sink=self)

    def emit(self, event):
        self.events.append(event)

    async def __aenter__(self):
        return self.pool

    async def __aexit__(self, *error):
        await self.pool.close()


def test_a_process_that_ends_takes_no_episode_with_it(tmp_path):
    kept = EnvironmentPoolOf(marker=str(tmp_path / "died"))

    async def run():
        async def play(number, environment):
            states = [await text(environment, "more")]
            states.append(await text(environment, "die once" if number == 2 else "more"))
            return [*states, await text(environment, "end")]

        async with kept as environments:
            return await together(environments, 4, play)

    assert asyncio.run(run()) == [[f"{number}: {count}" for count in (1, 2, 3)] for number in range(4)]
    (lost,) = [event for event in kept.events if isinstance(event, EnvironmentLost)]
    assert lost.retried
    assert "played again in processes of their own" in lost.reason


def test_an_episode_that_hangs_fails_alone():
    async def run():
        async def play(number, environment):
            await text(environment, "more")
            return await text(environment, "hang" if number == 1 else "more")

        quick = EnvironmentsConfig(processes=6, reset_deadline=20, step_deadline=3, retries=0)
        async with EnvironmentPoolOf(config=quick) as environments:
            return await together(environments, 3, play)

    first, second, third = asyncio.run(run())
    assert [first, third] == ["0: 2", "2: 2"]
    assert isinstance(second, EnvironmentFailed)
    assert "`step` did not return within 3 s" in str(second)


def test_an_exception_fails_its_own_episode_and_the_object_is_not_used_again():
    async def run():
        async with EnvironmentPoolOf(config=EnvironmentsConfig(processes=1)) as environments:
            async with environments.claim("t", held_out=False) as environment:
                await environment.reset(1)
                with pytest.raises(EnvironmentFailed, match="on purpose"):
                    await environment.step("raise")
            async with environments.claim("t", held_out=False) as environment:
                await environment.reset(2)
                return await text(environment, "more")

    assert asyncio.run(run()) == "2: 1"


def test_an_episode_that_is_another_one_when_it_is_played_again_fails():
    async def run():
        async def play(number, environment):
            await text(environment, "more")
            return await text(environment, "die")

        async with EnvironmentPoolOf(drifts=True) as environments:
            return await together(environments, 1, play)

    (failed,) = asyncio.run(run())
    assert isinstance(failed, EnvironmentFailed)
    assert "give the task `isolation: process`" in str(failed)


def test_a_task_that_keeps_losing_its_process_shares_none_any_more():
    async def run():
        async with EnvironmentPoolOf(config=EnvironmentsConfig(processes=2, retries=0)) as environments:
            for seed in range(4):
                with pytest.raises(EnvironmentFailed):
                    await asyncio.wait_for(_die(environments, seed), 30)
            return await together(environments, 2, lambda number, environment: text(environment, "who"))

    async def _die(environments, seed):
        async with environments.claim("t", held_out=False) as environment:
            await environment.reset(seed)
            await environment.step("die")

    assert len({who.split(" in ")[1] for who in asyncio.run(run())}) == 2


def test_a_cancelled_episode_leaves_its_slot_to_the_next():
    async def run():
        async with EnvironmentPoolOf(config=EnvironmentsConfig(processes=1)) as environments:

            async def play(seed):
                async with environments.claim("t", held_out=False) as environment:
                    await environment.reset(seed)
                    return await text(environment, "more")

            first = asyncio.create_task(play(1))
            await asyncio.sleep(0)
            second = asyncio.create_task(play(2))
            await asyncio.sleep(0)
            first.cancel()
            return await second, environments.in_use

    assert asyncio.run(run()) == ("2: 1", 0)
