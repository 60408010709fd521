"""Batches, on virtual time; the platform is modelled, the function and its answers are real."""

import asyncio
import json

import served_rewards
from local_platform import episode

from rollart.config import RewardConfig
from rollart.rewards.caller import CallUsage
from rollart.rewards.remote import RemoteReward
from rollart.rewards.runtime import Runtime
from rollart.rewards.transports.base import CallFailed, TransportReply, decode_response
from rollart.simulator.clock import run


class Platform:
    def __init__(self, function="lengths", seconds=1.0):
        served_rewards.calls.clear()
        self.runtime = Runtime(f"served_rewards:{function}", "")
        self.seconds = seconds
        self.sent = []

    async def start(self): ...

    async def close(self): ...

    async def send(self, body, key, deadline):
        request = json.loads(body)
        self.sent.append(len(request["episodes"]) if "episodes" in request else 1)
        await asyncio.sleep(self.seconds)
        status, answer = self.runtime.score(body)
        if status != 200:
            raise CallFailed(decode_response(answer).error)
        return TransportReply(decode_response(answer), 0.1, 0.8, False)


def remote(platform, function="lengths", retries=0, **options):
    reward = RewardConfig(function=f"served_rewards:{function}", invoker="http", url="http://x", **options)
    return RemoteReward(reward, platform, deadline=30.0, retries=retries)


async def score_all(rewards, ids, **info):
    usages = [CallUsage() for _ in ids]
    played = (episode(id, bad=id in info.get("bad", ())) for id in ids)
    scores = (rewards.score(each, usage) for each, usage in zip(played, usages, strict=True))
    return await asyncio.gather(*scores, return_exceptions=True), usages


def test_a_function_gets_batches_once_it_has_reported_that_it_takes_them():
    async def main():
        platform = Platform()
        rewards = remote(platform)
        await score_all(rewards, ["x"])
        results, usages = await score_all(rewards, ["a", "bb", "ccc", "dddd", "eeeee", "ffffff"])
        await rewards.close()
        return platform.sent, [result.value for result in results], usages

    sent, values, usages = run(main())
    assert sent == [1, 4, 2]
    assert values == [1, 2, 3, 4, 5, 6]
    assert usages[0].billed_s == 0.8 / 4


def test_a_function_that_takes_one_gets_one():
    async def main():
        platform = Platform("counted")
        await score_all(remote(platform, "counted"), ["x", "y"])
        await score_all(remote(platform, "counted"), ["x", "y", "z"])
        return platform.sent

    assert run(main()) == [1] * 5


def test_the_run_file_may_ask_for_smaller_batches_or_none():
    async def main(batch):
        platform = Platform()
        rewards = remote(platform, batch=batch)
        await score_all(rewards, ["x"])
        await score_all(rewards, ["a", "b", "c"])
        return sorted(platform.sent)

    assert run(main(1)) == [1, 1, 1, 1]
    assert run(main(2)) == [1, 1, 2]


def test_episodes_that_arrive_while_all_slots_are_taken_share_a_batch():
    async def main():
        platform = Platform()
        rewards = remote(platform, concurrency=1)
        await score_all(rewards, ["x"])
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(score_all(rewards, [f"late {number}"]))
                await asyncio.sleep(0.1)
        return platform.sent

    assert run(main()) == [1, 1, 4]


def test_one_bad_episode_of_a_batch_affects_no_other():
    async def main():
        platform = Platform()
        rewards = remote(platform, retries=1)
        await score_all(rewards, ["x"])
        results, _ = await score_all(rewards, ["a", "bb", "ccc"], bad=["bb"])
        return platform.sent, results

    sent, (one, bad, three) = run(main())
    assert (one.value, three.value) == (1.0, 3.0)
    assert isinstance(bad, CallFailed)
    assert "a bad one" in str(bad)
    assert sent == [1, 3, 1, 1, 1]


def test_a_cancelled_caller_does_not_affect_the_others():
    async def main():
        rewards = remote(Platform())
        await score_all(rewards, ["x"])
        gone = asyncio.create_task(rewards.score(episode("gone"), CallUsage()))
        stays = asyncio.create_task(rewards.score(episode("stays"), CallUsage()))
        await asyncio.sleep(0.5)
        gone.cancel()
        return await stays

    assert run(main()).value == 5.0


def test_a_batch_without_waiting_callers_is_cancelled():
    async def main():
        platform = Platform()
        rewards = remote(platform)
        await score_all(rewards, ["x"])
        gone = [asyncio.create_task(rewards.score(episode(id), CallUsage())) for id in "ab"]
        await asyncio.sleep(0.5)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        await asyncio.sleep(0)
        return platform.sent, rewards.running

    assert run(main()) == ([1, 2], 0)
    assert served_rewards.calls == [["x"]]


def test_closing_ends_what_still_waits():
    async def main():
        rewards = remote(Platform(seconds=20.0))
        await score_all(rewards, ["x"])
        waiting = [asyncio.create_task(rewards.score(episode(id), CallUsage())) for id in "ab"]
        await asyncio.sleep(0.5)
        await rewards.close()
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert all(isinstance(result, CallFailed) for result in run(main()))
