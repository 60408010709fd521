import asyncio
from contextlib import asynccontextmanager

import pytest

from rollart.config import RewardsConfig, TaskConfig
from rollart.core.errors import RewardFailed, ServiceError
from rollart.core.types import Episode, EpisodeTurn, Message, RewardResult
from rollart.rewards.pool import RewardPool


@asynccontextmanager
async def pool(*functions, config=None, **options):
    tasks = [TaskConfig(name=name, env="a:B", reward=f"hostile_rewards:{name}") for name in functions]
    rewards = RewardPool(tasks, config or RewardsConfig(retries=1), **options)
    try:
        yield rewards
    finally:
        await rewards.close()


async def until(condition):
    while not condition():  # noqa: ASYNC110 (state without an event of its own)
        await asyncio.sleep(0)


def episode(**info):
    return Episode("e", "t", 1, (EpisodeTurn((Message("user", "hi"),), "act", 0.25),), info=info)


async def score(function, config=None, **info):
    async with pool(function, config=config) as rewards:
        return await rewards.score(function, episode(**info))


@pytest.mark.parametrize(("answer", "value"), [(0.5, 0.5), (3, 3.0), (True, 1.0), (-2.5, -2.5)])
def test_a_number_is_a_result_without_parts(answer, value):
    assert asyncio.run(score("answer", answer=answer)) == RewardResult(value)


def test_a_whole_result_comes_back_whole():
    assert asyncio.run(score("whole")) == RewardResult(2.0, {"a": 1.0}, True)


@pytest.mark.parametrize(
    ("function", "info", "reason"),
    [
        (
            "answer",
            {},
            r"failed: KeyError: 'answer' \(hostile_rewards.py, line \d+, in answer\)",
        ),
        ("answer", {"answer": "much"}, r"it is 'much' \(str\); expected a number or a RewardResult"),
        ("answer", {"answer": None}, r"it is None \(NoneType\)"),
        ("infinite", {}, r"it is not finite; expected a finite number"),
        ("bad_part", {}, r"part 'a' is 'b' \(str\)"),
        ("bad_success", {}, r"`success` is 'yes'"),
        ("die", {}, r"'hostile_rewards:die' of task 'die' failed 2 times; .* ended by itself with exit code 4"),
    ],
)
def test_a_reward_that_cannot_be_computed_is_a_failure_and_never_a_number(function, info, reason):
    with pytest.raises(RewardFailed, match=reason):
        asyncio.run(score(function, **info))


@pytest.mark.slow
def test_a_reward_that_hangs_fails_at_its_deadline_and_its_worker_is_replaced():
    async def run():
        config = RewardsConfig(workers=1, deadline=0.3, retries=0)
        async with pool("hang", "whole", config=config) as rewards:
            with pytest.raises(RewardFailed, match=r"`score` did not return within 0.3 s"):
                await rewards.score("hang", episode())
        async with pool("hang", "whole", config=RewardsConfig(workers=1)) as rewards:
            hanging = asyncio.create_task(rewards.score("hang", episode()))
            await until(lambda: rewards.in_use)
            hanging.cancel()
            assert (await rewards.score("whole", episode())).value == 2.0

    asyncio.run(run())


def test_a_failed_call_is_retried_on_a_fresh_process(tmp_path):
    assert asyncio.run(score("die_once", marker=str(tmp_path / "died"))) == RewardResult(1.0)


def test_processes_start_on_demand_up_to_their_limit():
    async def run():
        async with pool("who", config=RewardsConfig(workers=3)) as rewards:
            return await asyncio.gather(*(rewards.score("who", episode()) for _ in range(30)))

    assert 1 <= len({result.value for result in asyncio.run(run())}) <= 3


def test_all_processes_end_when_there_is_nothing_to_score():
    async def run():
        async with pool("whole", idle_s=0.05) as rewards:
            await rewards.start()
            for _ in range(2):
                assert (await rewards.score("whole", episode())).value == 2.0
                await until(lambda: not rewards.processes)

    asyncio.run(run())


def test_a_reward_that_cannot_be_imported_is_known_at_the_start():
    async def run():
        async with pool("missing") as rewards:
            with pytest.raises(ServiceError, match="the rewards cannot start: `hostile_rewards:missing` cannot be"):
                await rewards.start()

    asyncio.run(run())


def test_quick_rewards_are_scored_in_batches_and_one_that_fails_costs_the_others_nothing():
    async def run():
        async with pool("answer", config=RewardsConfig(retries=1, workers=1)) as rewards:
            await rewards.score("answer", episode(answer=0))
            rewards._batches["answer"].seconds = 1e-4  # as measured where nothing else runs
            sizes, send = [], rewards.score_batch

            async def counted(task, episodes):
                sizes.append(len(episodes))
                return await send(task, episodes)

            rewards._batches["answer"].batcher._send = lambda episodes: counted("answer", episodes)
            answers = [0, 1, "much", 3, 4]
            scores = (rewards.score("answer", episode(answer=answer)) for answer in answers)
            return sizes, await asyncio.gather(*scores, return_exceptions=True)

    sizes, results = asyncio.run(run())
    assert sizes == [5]
    assert [result.value for result in results if isinstance(result, RewardResult)] == [0, 1, 3, 4]
    assert isinstance(results[2], RewardFailed)
    assert "it is 'much'" in str(results[2])
