"""The trajectories under way: members of groups, each a coroutine of its own.

Invariants: every member ends in one outcome, told once; a bug in a member's own code ends the run. `running` are those
that still play, `scoring` those whose episode is over. All state changes between two awaits are atomic.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from rollart.core.types import Outcome, Trajectory
from rollart.rollout.groups import Group
from rollart.rollout.trajectory import Attempt, RolloutTask, TrajectoryRunner


class Attempts:
    """`saw` hears of the oldest version in every answer, `ended` of every outcome, `failed` of bugs. With `score_late`,
    rewards wait until all have played."""

    def __init__(
        self,
        player: TrajectoryRunner,
        score_late: bool,
        saw: Callable[[Group, int], None],
        ended: Callable[[Group, Trajectory], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.running = 0
        self._player, self._score_late = player, score_late
        self._saw, self._ended, self._failed = saw, ended, failed
        self._attempts: dict[str, Attempt] = {}
        self._coroutines: set[asyncio.Task[None]] = set()
        self._all_played = asyncio.Event()

    @property
    def scoring(self) -> int:
        return len(self._attempts) - self.running

    def launch(self, group: Group, task: RolloutTask, version: int) -> None:
        """Start one more member of the group."""
        member = group.launch()
        attempt = Attempt(
            f"{group.id}.{member}",
            task,
            group.id,
            member,
            group.seed,
            version,
            on_version=partial(self._saw, group),
            on_played=self._played,
        )
        self._attempts[attempt.id] = attempt
        self.running += 1
        self._all_played.clear()
        coroutine = asyncio.create_task(self._run(group, attempt))
        self._coroutines.add(coroutine)
        coroutine.add_done_callback(self._report)

    def cancel(self, group: Group, verdict: Outcome, reason: str) -> None:
        for member in group.running:
            self._attempts[f"{group.id}.{member}"].cancel(verdict, reason)

    async def _run(self, group: Group, attempt: Attempt) -> None:
        trajectory = await self._player.run(attempt)
        del self._attempts[attempt.id]
        if not attempt.played:
            self._count_played()
        group.running.discard(attempt.member)
        self._ended(group, trajectory)

    def _report(self, coroutine: asyncio.Task[None]) -> None:
        """A bug in a member's own code must end the run, not vanish."""
        self._coroutines.discard(coroutine)
        if not coroutine.cancelled() and (error := coroutine.exception()) is not None:
            self._failed(error)

    async def _played(self) -> None:
        """An episode ended; its environment is free. Rewards of the `sync` preset wait for the whole batch."""
        self._count_played()
        if self._score_late:
            await self._all_played.wait()

    def _count_played(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._all_played.set()

    async def quiet(self) -> None:
        """Until none is under way."""
        while self._coroutines:
            await asyncio.wait(self._coroutines)

    async def stop(self) -> None:
        for attempt in self._attempts.values():
            attempt.cancel(Outcome.CANCELLED, "the run ended")
        await self.quiet()
