"""Tuning on the obstacle, in this process: the scheduler, a pool and a ledger in memory."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollart.config.robots import RobotRunFile
from rollart.core.errors import EnvironmentFailed
from rollart.core.schedule import Schedule
from rollart.core.types import Message, Publication, Step
from rollart.envs.obstacle import Obstacle, player
from rollart.robots.chunks import ImitationData
from rollart.robots.demonstrations import checked
from rollart.robots.exploration import ActingPolicy, RobotRunner, chunk_batch
from rollart.robots.learner import ImitationLearner, LearnerConfig, TrainedPolicy
from rollart.robots.suites import robot_task
from rollart.robots.tuning_learner import ChunkBatch, TuningLearner, learner_config
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import RolloutTask

TASK = robot_task("toy:obstacle")
RUN = {
    "task": "toy:obstacle",
    "demonstrations": {"episodes": 4},
    "control": {"history": 1, "chunk": 8, "execute": 8},
    "network": {"width": 16, "layers": 1},
    "training": {"steps": 40, "batch": 16, "lr_warmup": 5},
    "evaluation": {"episodes": 4, "quick": 2},
    "tuning": {"steps": 3, "groups": 2, "group_size": 2, "candidates": 4, "optimizer_steps": 3, "checkpoint_every": 2},
}


def run_file(**tuning: object) -> RobotRunFile:
    return RobotRunFile.model_validate({**RUN, "tuning": {**RUN["tuning"], **tuning}})


class LocalPool:
    """The obstacle in this process. `gate(seed)`: what a reset waits for, or None; `broken(claim)`: whether the claim
    with this number fails."""

    def __init__(self, gate=lambda seed: None, broken=lambda claim: False) -> None:
        self.claims, self.gate, self.broken = 0, gate, broken

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator["LocalClaim"]:
        self.claims += 1
        if self.broken(self.claims):
            raise EnvironmentFailed("the simulator crashed")
        yield LocalClaim(Obstacle(held_out=held_out), self.gate)


class LocalClaim:
    def __init__(self, env: Obstacle, gate) -> None:
        self.env, self.gate = env, gate

    async def reset(self, seed: int) -> tuple[Message, ...]:
        self.seed = seed
        return (Message("user", self.env.reset(seed)),)

    async def step(self, action: str) -> Step:
        if (event := self.gate(self.seed)) is not None:
            await event.wait()
        reply = self.env.step(action)
        done = reply["done"] or reply["truncated"]
        return Step((Message("user", reply["messages"]),), reward=reply["reward"], done=done, info=reply["info"])


def demonstrated(run: RobotRunFile) -> ImitationData:
    episodes = []
    for seed in range(run.demonstrations.episodes):
        env = Obstacle()
        seen, done, over = [json.loads(env.reset(seed))[0]], [], False
        while not over:
            done.append(json.loads(player(env, None))[0])
            reply = env.step(json.dumps(done[-1:]))
            seen.append(json.loads(reply["messages"])[0])
            over = reply["done"] or reply["truncated"]
        episodes.append(checked(seen, done, "the expert"))
    return ImitationData.of(episodes, run.control)


def tuner(folder: Path, run: RobotRunFile, steps: int = 5) -> TuningLearner:
    """From a policy that imitated for a few steps."""
    data = demonstrated(run)
    config = LearnerConfig(policy=run.policy, control=run.control, network=run.network, training=run.training)
    learner = ImitationLearner(config, [data], [run.seed])
    learner.train(steps)
    learner.export([folder / "start"], [run.task])
    return TuningLearner(learner_config(run), run.tuning, TrainedPolicy(folder / "start"), data, run.seed)


def exported(learner: TuningLearner, folder: Path) -> TrainedPolicy:
    learner.export([folder / "policy"], ["toy:obstacle"])
    return TrainedPolicy(folder / "policy")


class Kept:
    def __init__(self) -> None:
        self.events: list[object] = []

    def emit(self, event: object) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


class Exploring:
    """The scheduler, with the obstacle in this process and a ledger in memory."""

    def __init__(self, learner: TuningLearner, folder: Path, run: RobotRunFile, pool: LocalPool) -> None:
        exported(learner, folder)
        self.run, self.sink, self.ledger = run, Kept(), SqliteLedger.open(Path(":memory:"))
        self.acting = ActingPolicy(folder / "policy", run.tuning.optimizer_steps)
        self.scheduler = Scheduler(
            tasks=[RolloutTask(TASK.name)],
            schedule=Schedule(alpha=run.tuning.alpha),
            batch_groups=run.tuning.groups,
            group_size=run.tuning.group_size,
            steps=run.tuning.steps,
            runner=RobotRunner(
                environments=pool, acting=self.acting, task=TASK, explore=run.tuning.explore, sink=self.sink
            ),
            engines=self.acting,
            ledger=self.ledger,
            sink=self.sink,
        )

    async def take(self) -> ChunkBatch:
        batch = await self.scheduler.take_batch()
        return chunk_batch(batch, self.ledger, self.run.tuning.advantage, self.acting.policy)

    def advance(self, learner: TuningLearner, folder: Path) -> None:
        """An update that changed nothing."""
        learner.step += self.run.tuning.optimizer_steps
        exported(learner, folder)
        self.acting.announce(Publication(self.acting.serving + 1))


def batch_of(learner: TuningLearner, folder: Path, run: RobotRunFile) -> ChunkBatch:
    async def take() -> ChunkBatch:
        exploring = Exploring(learner, folder, run, LocalPool())
        try:
            return await exploring.take()
        finally:
            await exploring.scheduler.stop()

    return asyncio.run(take())
