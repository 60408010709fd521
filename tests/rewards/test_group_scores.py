"""Attempts at an episode wait for one another and are scored together; judges compare them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from test_judge import endpoint

from rollart.config import RewardConfig, RewardsConfig, TaskConfig
from rollart.core.errors import RewardFailed
from rollart.core.events import RewardCalled
from rollart.core.types import Episode, EpisodeTurn, Message, RewardResult
from rollart.rewards.caller import CallUsage
from rollart.rewards.group_judges import pairwise, ranking
from rollart.rewards.group_scores import GroupScores
from rollart.rewards.invokers import Rewards
from rollart.rewards.judge import JudgeFailed


def attempt(number: int, text: str = "", seed: int = 1) -> Episode:
    return Episode(f"e-{seed}.{number}", "t", seed, (EpisodeTurn((Message("user", "Be kind."),), text),))


async def by_id(task: str, episodes: Sequence[Episode], usage: CallUsage) -> list[RewardResult]:
    usage.tries = 1
    return [RewardResult(float(episode.id.rpartition(".")[2]), {"peers": float(len(episodes))}) for episode in episodes]


def scored(
    work: Callable[[GroupScores], Awaitable[list[Any]]], score: Any = by_id, deadline: float = 60.0
) -> list[Any]:
    async def run() -> list[Any]:
        groups = GroupScores(score, deadline)
        async with asyncio.timeout(20):
            return await work(groups)

    return asyncio.run(run())


def test_a_group_is_scored_when_all_its_attempts_are_there() -> None:
    async def work(groups: GroupScores) -> list[Any]:
        early = [asyncio.create_task(groups.score("t", attempt(n), 3, CallUsage())) for n in (2, 0)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in early)
        other = asyncio.create_task(groups.score("t", attempt(5, seed=9), 1, CallUsage()))
        return await asyncio.gather(*early, groups.score("t", attempt(1), 3, CallUsage()), other)

    results = scored(work)
    assert [result.value for result in results] == [2.0, 0.0, 1.0, 5.0]
    assert [result.parts["peers"] for result in results] == [3.0, 3.0, 3.0, 1.0]


def test_one_that_is_cancelled_leaves_and_its_replacement_completes_the_group() -> None:
    async def work(groups: GroupScores) -> list[Any]:
        first = asyncio.create_task(groups.score("t", attempt(0), 2, CallUsage()))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return await asyncio.gather(*(groups.score("t", attempt(n), 2, CallUsage()) for n in (1, 2)))

    assert [result.parts["peers"] for result in scored(work)] == [2.0, 2.0]


def test_after_the_deadline_those_that_are_there_are_compared_and_one_alone_fails() -> None:
    async def work(groups: GroupScores) -> list[Any]:
        two = [groups.score("t", attempt(n), 3, CallUsage()) for n in (0, 1)]
        return await asyncio.gather(*two, groups.score("t", attempt(7, seed=2), 3, CallUsage()), return_exceptions=True)

    *two, alone = scored(work, deadline=0.01)
    assert [result.parts["peers"] for result in two] == [2.0, 2.0]
    assert isinstance(alone, RewardFailed) and "nothing to compare it with" in str(alone)


def test_a_call_that_fails_is_a_failed_reward_of_all_its_members() -> None:
    async def failing(task: str, episodes: Sequence[Episode], usage: CallUsage) -> list[RewardResult]:
        usage.tries = 3
        raise RewardFailed("no judge")

    usages = [CallUsage(), CallUsage()]

    async def work(groups: GroupScores) -> list[Any]:
        calls = [groups.score("t", attempt(n), 2, usage) for n, usage in enumerate(usages)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [str(error) for error in scored(work, failing)] == ["no judge"] * 2
    assert [usage.tries for usage in usages] == [3, 3]


def longest(episodes: list[Episode], bonus: float = 0.0) -> list[float]:
    """A reward of groups: the share of the others that are shorter."""
    sizes = [len(episode.turns[-1].action) for episode in episodes]
    return [bonus + sum(other < size for other in sizes) / max(1, len(sizes) - 1) for size in sizes]


longest.batch = True  # type: ignore[attr-defined]


def one_short(episodes: list[Episode]) -> list[float]:
    return [0.0] * (len(episodes) - 1)


one_short.batch = True  # type: ignore[attr-defined]


@pytest.mark.slow
def test_local_processes_score_whole_groups_and_every_member_is_counted() -> None:
    events: list[RewardCalled] = []

    class Sink:
        def emit(self, event: Any) -> None:
            events.append(event)

    async def run(name: str, **more: Any) -> list[Any]:
        reward = RewardConfig(function=f"test_group_scores:{name}", group=True, retries=0, **more)
        rewards = Rewards([TaskConfig(name="t", env="a:B", reward=reward)], RewardsConfig(workers=1), sink=Sink())
        await rewards.start()
        try:
            members = [rewards.score_member("t", attempt(n, "x" * n), 3) for n in range(3)]
            return await asyncio.gather(*members, return_exceptions=True)
        finally:
            await rewards.close()

    results = asyncio.run(run("longest", args={"bonus": 1.0}))
    assert [result.value for result in results] == [1.0, 1.5, 2.0] and len(events) == 3
    failed = asyncio.run(run("one_short"))
    assert all(isinstance(error, RewardFailed) and "a list of 3 rewards" in str(error) for error in failed)
    assert [bool(event.reason) for event in events] == [False] * 3 + [True] * 3


def better(request: Any) -> str:
    """A judge that prefers the conversation with more sevens."""
    text = request["messages"][0]["content"]
    first, _, second = text.partition("Conversation B:")
    gap = first.count("7") - second.count("7")
    return "Both tried.\nBetter: " + ("A" if gap > 0 else "B" if gap < 0 else "tie")


def test_pairwise_rewards_are_shares_of_comparisons_won() -> None:
    episodes = [attempt(n, text) for n, text in enumerate(("7", "777", "", "7"))]
    with endpoint(better) as (url, seen):
        results = pairwise(episodes, url=url, model="judge")
        assert len(seen) == 6
        assert [result.value for result in results] == pytest.approx([0.5, 1.0, 0.0, 0.5])
        ring = pairwise(episodes, url=url, model="judge", opponents=2, both_ways=True)
        assert len(seen) == 6 + 8 and all(result.parts["comparisons"] == 4.0 for result in ring)
        assert pairwise(episodes[:1], url=url, model="judge")[0].value == 0.5
    with endpoint("I like both.") as (url, _), pytest.raises(JudgeFailed, match="named no better one"):
        pairwise(episodes, url=url, model="judge")


def test_a_judge_that_prefers_the_first_favours_nobody() -> None:
    with endpoint("Better: A") as (url, _):
        odd = pairwise([attempt(n) for n in range(5)], url=url, model="judge")
        even = pairwise([attempt(n) for n in range(6)], url=url, model="judge")
    assert {result.value for result in odd} == {0.5}
    assert {result.parts["wins"] for result in even} == {2.0, 3.0} and all(r.parts["comparisons"] == 5 for r in even)


def test_a_ranking_gives_each_attempt_a_number_within_the_scale() -> None:
    episodes = [attempt(n) for n in range(3)]
    for reply, sentence in (
        ("1: 7\n2: 3", "scored \\[1, 2\\] of 3 attempts"),
        ("1: 7\n2: 3\n3: 11", "gave 11, which is not between 0 and 10"),
        ("All fine.", "scored \\[\\] of 3 attempts"),
    ):
        with endpoint(reply) as (url, _), pytest.raises(JudgeFailed, match=sentence):
            ranking(episodes, url=url, model="judge")
    with endpoint("The second is best.\n1: 2.5\n2: 10\n**3**: 0") as (url, seen):
        assert [result.value for result in ranking(episodes, url=url, model="judge")] == [0.25, 1.0, 0.0]
    assert "1: N` to `3: N" in json.dumps(seen[0][2])


def test_text_of_the_policy_fills_no_placeholder() -> None:
    with endpoint("Better: tie") as (url, seen):
        pairwise([attempt(0, "{second}"), attempt(1, "SECRET")], url=url, model="judge")
    assert seen[0][2]["messages"][0]["content"].count("SECRET") == 1
