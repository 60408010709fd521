"""Rewards of groups: the attempts at an episode wait for one another, and are scored in one call.

Invariants: an attempt is in one call at most; one that is cancelled while it waits, because its group is dropped or has
its members, leaves without a trace; once its call has begun it cannot spoil that of the others. An attempt waits
`deadline` seconds at most: then those that are there are compared, and one that is alone fails. A call that fails is a
failed reward of all its members.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from rollart.core.errors import RewardFailed
from rollart.core.types import Episode, RewardResult
from rollart.rewards.caller import CallUsage

ScoreGroup = Callable[[str, Sequence[Episode], CallUsage], Awaitable[list[RewardResult]]]


@dataclass(eq=False, slots=True)
class _Member:
    episode: Episode
    usage: CallUsage
    scored: asyncio.Future[RewardResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class GroupScores:
    """`score` calls the function with all members of a group."""

    def __init__(self, score: ScoreGroup, deadline: float) -> None:
        self._score, self._deadline = score, deadline
        self._waiting: dict[tuple[str, int], list[_Member]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def score(self, task: str, episode: Episode, peers: int, usage: CallUsage) -> RewardResult:
        """Raises RewardFailed."""
        key, member = (task, episode.seed), _Member(episode, usage)
        waiting = self._waiting.setdefault(key, [])
        waiting.append(member)
        if len(waiting) >= peers:
            self._begin(key)
        try:
            await asyncio.wait([member.scored], timeout=self._deadline)
            if not member.scored.done() and member in self._waiting.get(key, ()):
                self._begin(key, late=True)
            return await member.scored
        finally:
            if member in (left := self._waiting.get(key, [])):
                left.remove(member)
                if not left:
                    del self._waiting[key]

    def _begin(self, key: tuple[str, int], *, late: bool = False) -> None:
        members = self._waiting.pop(key)
        if late and len(members) == 1:
            reason = f"no other attempt at its episode ended within {self._deadline:g} s (rewards.group_deadline)"
            members[0].scored.set_exception(RewardFailed(f"{reason}, so there is nothing to compare it with"))
            return
        call = asyncio.create_task(self._call(key[0], members))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _call(self, task: str, members: Sequence[_Member]) -> None:
        usage = CallUsage()
        try:
            results = await self._score(task, [member.episode for member in members], usage)
        except Exception as error:  # each of them raises it
            for member in members:
                if not member.scored.done():
                    member.scored.set_exception(error)
                    member.scored.exception()  # of a member that was cancelled since, nobody asks for it
            return
        finally:
            for member in members:
                member.usage.add_share(usage, len(members))
        for member, result in zip(members, results, strict=True):
            if not member.scored.done():
                member.scored.set_result(result)

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
