"""Rewards run beside rollout: on virtual time, with one environment and rewards that take long."""

import asyncio
import random
from contextlib import asynccontextmanager

from benchmarks.modelled import ModelledEngine, ModelledEnvironments, ModelledRenderer
from rollart.core.events import EnvironmentReset, Scored
from rollart.core.types import Outcome, RewardResult, Sampling
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.router import Router
from rollart.rollout.trajectory import Attempt, RolloutTask, TrajectoryRunner
from rollart.simulator.clock import run

PLAN = RolloutTask("t", 1.0, 50, 100_000, Sampling(max_tokens=8), deadline=1000.0)
SCORE_S = 100.0


class Sink(list):
    def emit(self, event):
        self.append((asyncio.get_running_loop().time(), event))

    def times(self, kind):
        return [time for time, event in self if isinstance(event, kind)]


class SlowRewards:
    """Notes how many environments are in use when it is asked, and how many it scores at once."""

    def __init__(self, environments):
        self.environments, self.in_use, self.now, self.most = environments, [], 0, 0

    async def score(self, task, episode):
        self.in_use.append(self.environments.in_use)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(SCORE_S)
        self.now -= 1
        return RewardResult(1.0)


@asynccontextmanager
async def playing():

    rng, sink = random.Random(0), Sink()
    environments = ModelledEnvironments(rng, processes=1)
    rewards = SlowRewards(environments)
    router = Router(EngineRegistry({"engine": ModelledEngine(rng)}, sink=sink))
    runner = TrajectoryRunner(
        environments=environments,
        router=router,
        renderer=ModelledRenderer(),
        rewards=rewards,
        sink=sink,
    )
    yield runner, rewards, sink


def test_the_environment_is_free_the_moment_the_episode_ends():
    async def main():
        async with playing() as (player, rewards, sink):
            attempts = [Attempt(f"t-{number}", PLAN, "g", number, 1, 0) for number in range(5)]
            played = await asyncio.gather(*(player.run(attempt) for attempt in attempts))
            return played, rewards, sink

    played, rewards, sink = run(main())
    assert all(trajectory.outcome is Outcome.FINISHED for trajectory in played)
    assert rewards.in_use[0] == 0, "the claim must end before the reward is asked for"
    assert rewards.most == 5, "with one environment, all five are scored at the same time"
    assert max(sink.times(EnvironmentReset)) < min(sink.times(Scored)), (
        "the last episode begins before the first is scored"
    )
