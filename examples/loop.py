"""The whole asynchronous loop on one page: scheduler, router, engine, environment, reward and trainer.

    python examples/loop.py

A tiny model with random weights learns to repeat the letter that its environment shows, in less than a minute on a CPU.
`rollart train` runs the same loop from a run file: there, each part is a process of its own, on the machine that
placement chose, supervised and restarted. Here everything is in this process, so that the loop can be read.

Five things happen at the same time:
- Every trajectory is a coroutine: it claims an environment, asks the router for actions, and is scored when it is over.
- The router sends each request to an engine, which decodes all open requests as one batch.
- The scheduler starts groups of trajectories ahead of the trainer, but not further than the staleness bound allows.
- The trainer takes a batch as soon as there is one, and publishes the new weights after its step.
- The engine swaps to them between two tokens, while trajectories are under way.
"""

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollart.config import AlgorithmConfig, EngineConfig, TinyModelConfig, TrainingConfig
from rollart.core.schedule import Schedule
from rollart.core.types import Batch, Episode, Message, Publication, RewardResult, Sampling, Step
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel
from rollart.models import tiny
from rollart.models.chat import ChatRenderer
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.router import Router
from rollart.rollout.scheduler import Scheduler
from rollart.rollout.trajectory import RolloutTask, TrajectoryRunner
from rollart.training.trainer import Trainer
from rollart.weights.publish import publish
from rollart.weights.reader import WeightReader

STEPS = 50
GROUPS, GROUP_SIZE = 16, 8  # a batch is 16 episodes, each tried 8 times
TURNS = 3
LETTERS = "abcd"


# 1. The environment: what the policy sees, and what its actions do.


class Echo:
    """Shows a letter on each turn and rewards the action that repeats it. The seed decides the letters, so all members
    of a group see the same ones, and what tells them apart is what the policy did."""

    def __init__(self) -> None:
        self.letters: list[str] = []

    async def reset(self, seed: int) -> tuple[Message, ...]:
        self.letters = random.Random(seed).choices(LETTERS, k=TURNS)
        return (Message("user", self.letters[0]),)

    async def step(self, action: str) -> Step:
        shown = self.letters.pop(0)
        reward = float(action == shown)
        following = (Message("user", self.letters[0]),) if self.letters else ()
        return Step(following, reward=reward, done=not self.letters)


class Environments:
    """Gives each trajectory an environment. `rollart.envs.pool` has the same method, with a process for each of them:
    foreign code may crash, block or leak there."""

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator[Echo]:
        yield Echo()


# 2. The reward: computed after the environment was released, so that a slow judge holds up no environment.


class Rewards:
    async def score(self, task: str, episode: Episode) -> RewardResult:
        return RewardResult(episode.env_return / TURNS)


# 3. The loop.


async def train(folder: Path, steps: int = STEPS) -> list[float]:
    """Returns the mean reward of each batch."""
    model = tiny.make(TinyModelConfig(hidden=64, layers=2, heads=2, kv_heads=1, context=64), folder / "model", seed=0)
    weights = folder / "weights"  # the weight store: the trainer writes versions, engines read them
    engine = TorchEngine(EngineModel.open(model), EngineConfig(max_batch=256), store=WeightReader(weights))

    # The control plane has no threads, no network and no clock of its own: the same code runs simulated clusters.
    router = Router(EngineRegistry({"engine": engine}))
    runner = TrajectoryRunner(
        environments=Environments(), router=router, renderer=ChatRenderer(model), rewards=Rewards()
    )
    scheduler = Scheduler(
        tasks=[RolloutTask("echo", max_turns=TURNS, max_context=64, sampling=Sampling(max_tokens=1))],
        schedule=Schedule(alpha=1),  # no token is trained that is more than one version old
        batch_groups=GROUPS,
        group_size=GROUP_SIZE,
        steps=steps,
        runner=runner,
        engines=router.engines,
        ledger=SqliteLedger.open(folder / "ledger.sqlite"),  # what a killed run would resume from
    )
    # At first one action in a hundred is right: the entropy bonus keeps the policy trying the others.
    trainer = Trainer(model, TrainingConfig(steps=steps, lr=1e-3, algorithm=AlgorithmConfig(entropy=0.05)))

    rewards: list[float] = []
    swaps: set[asyncio.Task[None]] = set()
    async with engine:
        for step in range(steps):
            batch = await scheduler.take_batch()
            # The optimizer gets a thread, so that trajectories go on meanwhile.
            metrics = await asyncio.to_thread(trainer.step, batch)
            scheduler.finish_step()

            publication = await asyncio.to_thread(publish_weights, trainer, weights)
            # The loop does not wait for the engine: it fetches, then swaps between two tokens, and each token carries
            # the version that sampled it. As soon as the new version serves, the scheduler starts more groups.
            swaps.add(asyncio.create_task(router.engines.load(publication)))

            rewards.append(mean_reward(batch))
            print(f"step {step + 1:3}  reward {rewards[-1]:.3f}  staleness {staleness(batch)}  {metrics.seconds:.2f} s")
        await asyncio.gather(*swaps)
        await scheduler.stop()
    return rewards


def publish_weights(trainer: Trainer, store: Path) -> Publication:
    version, weights = trainer.snapshot()
    return publish(store, version, weights)


# 4. What is worth printing.


def mean_reward(batch: Batch) -> float:
    rewards = [reward for group in batch.groups for reward in group.rewards.values()]
    return sum(rewards) / len(rewards)


def staleness(batch: Batch) -> float:
    """Versions between the policy that sampled a token and the one that was trained on it, on average."""
    samples = [sample for group in batch.groups for sample in group.samples]
    ages = [batch.step - version for sample in samples for version in sample.versions.array.tolist()]
    return round(sum(ages) / len(ages), 2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(train(Path(directory)))
