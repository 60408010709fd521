"""The attempts under way: members of groups, each a coroutine of its own.

Invariants: every attempt ends in one outcome, reported once; a bug in the code of an attempt ends the run. `running`
counts those whose episode goes on, `scoring` those whose episode is over. All state changes between two awaits are
atomic.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from rollart.core.types import Outcome, Trajectory
from rollart.rollout.evaluation import EpisodeRunner
from rollart.rollout.groups import Group
from rollart.rollout.trajectory import Attempt, RolloutTask


class Attempts:
    """Callbacks: `on_version` gets the oldest version of every completion, `on_end` every outcome, `on_bug` exceptions
    of our own code. With `score_late`, rewards wait until all episodes are over."""

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        score_late: bool,
        on_version: Callable[[Group, int], None],
        on_end: Callable[[Group, Trajectory], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self.running = 0
        self._runner, self._score_late = runner, score_late
        self._on_version, self._on_end, self._on_bug = on_version, on_end, on_bug
        self._attempts: dict[str, Attempt] = {}
        self._coroutines: set[asyncio.Task[None]] = set()
        self._none_running = asyncio.Event()

    @property
    def scoring(self) -> int:
        return len(self._attempts) - self.running

    def launch(self, group: Group, task: RolloutTask, version: int) -> None:
        """Start one more member of the group."""
        member = group.launch()
        attempt = Attempt(
            id=f"{group.id}.{member}",
            task=task,
            group=group.id,
            member=member,
            seed=group.seed,
            version=version,
            peers=group.size - len(group.done),
            on_version=partial(self._on_version, group),
            on_episode_end=self._episode_ended,
        )
        self._attempts[attempt.id] = attempt
        self.running += 1
        self._none_running.clear()
        coroutine = asyncio.create_task(self._run(group, attempt))
        self._coroutines.add(coroutine)
        coroutine.add_done_callback(self._check)

    def cancel(self, group: Group, verdict: Outcome, reason: str) -> None:
        for member in group.running:
            self._attempts[f"{group.id}.{member}"].cancel(verdict, reason)

    async def _run(self, group: Group, attempt: Attempt) -> None:
        trajectory = await self._runner.run(attempt)
        del self._attempts[attempt.id]
        if not attempt.episode_over:
            self._count_down()
        group.running.discard(attempt.member)
        self._on_end(group, trajectory)

    def _check(self, coroutine: asyncio.Task[None]) -> None:
        """A bug must end the run, not vanish."""
        self._coroutines.discard(coroutine)
        if not coroutine.cancelled() and (error := coroutine.exception()) is not None:
            self._on_bug(error)

    async def _episode_ended(self) -> None:
        """Its environment is free. Rewards of the `sync` preset wait for the whole batch."""
        self._count_down()
        if self._score_late:
            await self._none_running.wait()

    def _count_down(self) -> None:
        self.running -= 1
        if self.running == 0:
            self._none_running.set()

    async def wait(self) -> None:
        """Until none is under way."""
        while self._coroutines:
            await asyncio.wait(self._coroutines)

    async def stop(self) -> None:
        for attempt in self._attempts.values():
            attempt.cancel(Outcome.CANCELLED, "the run ended")
        await self.wait()
