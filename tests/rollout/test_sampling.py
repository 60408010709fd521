"""Rollouts without training: what is played follows from the plan, whatever was played before."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollart.core.types import Outcome, Trajectory
from rollart.rollout.sampling import SamplePlan, Sampler
from rollart.rollout.trajectory import Attempt, RolloutTask

TASKS = [RolloutTask("lake"), RolloutTask("sums", numbered=True)]


@dataclass
class Runner:
    """Plays at once; `outcomes` of an id are used up one after the other, then all finish."""

    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    played: list[Attempt] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    on_play: Callable[[], None] = lambda: None

    async def run(self, attempt: Attempt) -> Trajectory:
        self.played.append(attempt)
        self.running += 1
        self.peak = max(self.peak, self.running)
        self.on_play()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return self._trajectory(attempt, Outcome.CANCELLED)
        finally:
            self.running -= 1
        left = self.outcomes.get(attempt.id, [])
        return self._trajectory(attempt, left.pop(0) if left else Outcome.FINISHED)

    def _trajectory(self, attempt: Attempt, outcome: Outcome) -> Trajectory:
        return Trajectory(attempt.id, attempt.task.name, attempt.group, attempt.member, attempt.seed, outcome)


class Kept:
    def __init__(self) -> None:
        self.trajectories: list[Trajectory] = []

    def add(self, trajectory: Trajectory, *, held_out: bool = False) -> None:
        assert held_out, "a sample would be trained"
        self.trajectories.append(trajectory)


def sampled(plan: SamplePlan, runner: Runner, done: Sequence[str] = (), *, retries: int = 0) -> list[Trajectory]:
    kept = Kept()
    asyncio.run(Sampler(runner, kept, parallel=3, retries=retries).run(plan, TASKS, set(done)))  # type: ignore[arg-type]
    return kept.trajectories


def test_every_episode_is_played_as_often_as_asked_and_no_more_at_once_than_allowed() -> None:
    runner = Runner()
    played = sampled(SamplePlan(4, 2), runner)
    assert len(played) == 4 * 2 * len(TASKS) and runner.peak == 3
    assert len({trajectory.id for trajectory in played}) == len(played)
    seeds = {(trajectory.task, trajectory.group): trajectory.seed for trajectory in played}
    assert len(set(seeds.values())) == 8, "attempts at an episode share its seed, and episodes differ"


def test_what_is_missing_is_played_as_it_would_have_been() -> None:
    plan = SamplePlan(4, 2, seed=5)
    whole = {trajectory.id: trajectory.seed for trajectory in sampled(plan, Runner())}
    done = list(whole)[:5]
    rest = {trajectory.id: trajectory.seed for trajectory in sampled(plan, Runner(), done)}
    assert rest == {id: seed for id, seed in whole.items() if id not in done}


def test_seeds_differ_by_run_and_from_those_that_are_held_out() -> None:
    drawn = [{t.seed for t in sampled(plan, Runner())} for plan in (SamplePlan(3, 1), SamplePlan(3, 1, seed=1))]
    held_out = {t.seed for t in sampled(SamplePlan(3, 1, held_out=True), Runner()) if t.task == "lake"}
    assert not drawn[0] & drawn[1] and not drawn[0] & held_out
    assert held_out == {TASKS[0].episode_seed(number, "held out") for number in range(3)}


def test_an_attempt_that_a_service_failed_is_played_again_and_recorded_once() -> None:
    id, failed = "sample-lake-000000.0", Outcome.ENV_FAILED
    again = sampled(SamplePlan(1, 1), Runner({id: [failed, failed]}), retries=2)
    assert [t.outcome for t in again if t.id == id] == [Outcome.FINISHED]
    given_up = sampled(SamplePlan(1, 1), Runner({id: [failed] * 3}), retries=2)
    assert [t.outcome for t in given_up if t.id == id] == [failed]


def test_a_sampling_that_is_cancelled_starts_nothing_more() -> None:
    runner, kept = Runner(), Kept()

    async def cancelled() -> None:
        sampling = asyncio.ensure_future(
            Sampler(runner, kept, parallel=3).run(SamplePlan(50, 1), TASKS)  # type: ignore[arg-type]
        )
        runner.on_play = lambda: sampling.cancel() and None if len(runner.played) == 7 else None
        await asyncio.wait([sampling])
        assert sampling.cancelled()

    asyncio.run(cancelled())
    assert len(runner.played) <= 9 and not any(t.outcome is Outcome.CANCELLED for t in kept.trajectories)
