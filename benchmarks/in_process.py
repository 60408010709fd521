"""RL in one process on one core: real environments, the embedded engine and the trainer, without services.

The staleness is exact: with `alpha` every token of a batch is that many versions old, but for the first batches. A run
of a tiny model takes about a minute of CPU, and the same seed gives the same run.
"""

import os
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rollart.config import EngineConfig, TinyModelConfig, TrainingConfig, WarmupConfig
from rollart.core.types import (
    Batch,
    Completion,
    Episode,
    EpisodeTurn,
    Example,
    GenerationRequest,
    Message,
    Outcome,
    RewardResult,
    SampleGroup,
    Sampling,
    Trajectory,
    Turn,
)
from rollart.engines.torch.model import EngineModel
from rollart.engines.torch.stepper import Stepper
from rollart.envs.column_sum import ColumnSum
from rollart.envs.column_sum import player as play_column_sum
from rollart.envs.frozen_lake import FrozenLake
from rollart.envs.frozen_lake import player as play_frozen_lake
from rollart.envs.guess_number import GuessNumber
from rollart.envs.guess_number import player as play_guess_number
from rollart.models import tiny
from rollart.models.chat import ChatRenderer, conversation_tokens
from rollart.rewards.functions import column_sum, env_return
from rollart.rollout.samples import samples
from rollart.training.checkpoint import save_checkpoint
from rollart.training.export import export_model
from rollart.training.trainer import Trainer
from rollart.warmup.examples import batches

HELD_OUT = 1 << 40  # seeds from here on are never trained


@dataclass(frozen=True)
class Game:
    """A task: how its environment is made, its scripted player and its limits."""

    name: str
    make: Any
    player: Any
    skill: float
    turns: int
    tokens: int
    context: int
    args: dict[str, Any] = field(default_factory=dict)
    reward: Any = env_return


GAMES = {
    game.name: game
    for game in (
        Game("frozen_lake", FrozenLake, play_frozen_lake, skill=0.4, turns=10, tokens=4, context=400),
        Game(
            "guess_number",
            GuessNumber,
            play_guess_number,
            skill=0.4,
            turns=3,
            tokens=6,
            context=200,
            args={"top": 23, "min_width": 5, "max_width": 8, "guesses": 3},
        ),
        Game("column_sum", ColumnSum, play_column_sum, skill=0.75, turns=1, tokens=40, context=200, reward=column_sum),
    )
}


def messages_of(reply: Any) -> tuple[Message, ...]:
    said = reply["messages"] if isinstance(reply, dict) else reply
    return (Message("user", said),) if isinstance(said, str) and said else ()


def warm_model(
    folder: Path,
    games: Sequence[Game],
    *,
    steps: int,
    demonstrations: int,
    seed: int = 0,
    optimizer: str = "adamw",
    lr: float = 3e-3,
) -> Path:
    """A tiny model that imitated the players of the games, made once in `folder`."""
    if (folder / "warm" / "config.json").exists():
        return folder / "warm"
    sizes = TinyModelConfig(hidden=96, layers=3, heads=3, kv_heads=1, context=512)
    source = tiny.make(sizes, folder / "model", seed=seed)
    renderer = ChatRenderer(source)
    examples = []
    for game in games:
        env = game.make(**game.args)
        for number in range(demonstrations):
            tokens, mask = conversation_tokens(renderer, demonstration(game, env, number))
            examples.append(Example(tokens, mask))
    trainer = Trainer(source, TrainingConfig.model_validate({"optimizer": optimizer}), seed=seed)
    for batch in batches(examples, WarmupConfig(steps=steps, batch=48, lr=lr), seed=seed):
        trainer.imitate(batch)
    save_checkpoint(trainer, folder / "checkpoint").result()
    export_model(folder / "checkpoint", folder / "warm")
    return folder / "warm"


def demonstration(game: Game, env: Any, number: int) -> list[EpisodeTurn]:
    rng = random.Random(f"demonstration {number}")
    shown, turns = messages_of(env.reset(number)), []
    while True:
        action = game.player(env, rng, skill=game.skill)
        reply = env.step(action)
        turns.append(EpisodeTurn(shown, action, reply["reward"]))
        if reply["done"] or len(turns) == game.turns:
            return turns
        shown = messages_of(reply)


@dataclass
class Play:
    """An episode under way."""

    id: str
    game: Game
    env: Any
    seed: int
    group: str
    member: int
    prompt: list[int]
    shown: tuple[Message, ...]
    context: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome | None = None


class Player:
    """Plays episodes with the weights that it was given last."""

    def __init__(self, folder: Path, max_batch: int = 512) -> None:
        self.model = EngineModel.open(folder)
        self.stepper = Stepper(self.model, EngineConfig(max_batch=max_batch))
        self.renderer = ChatRenderer(folder)
        self.version = 0
        self._count = 0

    def load(self, trainer: Trainer) -> None:
        version, weights = trainer.snapshot()
        self.stepper.swap(version, self.model.prepare(weights))
        self.version = version

    def groups(self, plan: Sequence[tuple[Game, int]], size: int) -> tuple[SampleGroup, ...]:
        """A group of `size` episodes for each game and seed."""
        played = self.play([(game, seed, f"{game.name}-{seed}", n) for game, seed in plan for n in range(size)])
        rows = [played[at : at + size] for at in range(0, len(played), size)]
        return tuple(
            SampleGroup(row[0].group, row[0].task, tuple(each for one in row for each in samples(one))) for row in rows
        )

    def held_out(self, games: Sequence[Game], episodes: int) -> tuple[dict[str, float], dict[str, float]]:
        """Success and reward by game."""
        played = self.play([(game, HELD_OUT + n, f"held-out-{n}", 0) for game in games for n in range(episodes)], True)
        by_game = {game.name: [one for one in played if one.task == game.name] for game in games}
        return (
            {name: fmean(bool(one.success) for one in ended) for name, ended in by_game.items()},
            {name: fmean(one.reward or 0.0 for one in ended) for name, ended in by_game.items()},
        )

    def success(self, games: Sequence[Game], episodes: int) -> dict[str, float]:
        return self.held_out(games, episodes)[0]

    def play(self, plan: Sequence[tuple[Game, int, str, int]], held_out: bool = False) -> list[Trajectory]:
        plays = []
        for game, seed, group, member in plan:
            env = game.make(**game.args, held_out=held_out)
            shown = messages_of(env.reset(seed))
            self._count += 1
            plays.append(
                Play(
                    f"{group}/{member}/{self._count}", game, env, seed, group, member, self.renderer.open(shown), shown
                )
            )
        while waiting := [one for one in plays if one.outcome is None]:
            for one, completion in zip(waiting, self._generate(waiting), strict=True):
                self._act(one, completion)
        return [self._trajectory(one) for one in plays]

    def _generate(self, waiting: Sequence[Play]) -> Iterator[Completion]:
        for one in waiting:
            turn = len(one.turns)
            seed = random.Random(f"{one.id} {turn} {self.version}").randrange(1 << 31)
            sampling = Sampling(max_tokens=one.game.tokens, stop=self.renderer.stop, seed=seed)
            request = GenerationRequest(
                id=f"{one.id}/{turn}",
                session=one.id,
                task=one.game.name,
                turn=turn,
                tokens=[*one.context, *one.prompt],
                sampling=sampling,
            )
            self.stepper.add(self.stepper.accept(request))
        while self.stepper.busy:
            self.stepper.step()
        made = {sequence.id: sequence.completion() for sequence in self.stepper.ended()}
        return (made[f"{one.id}/{len(one.turns)}"] for one in waiting)

    def _act(self, one: Play, completion: Completion) -> None:
        action = self.renderer.text(completion.tokens)
        reply = one.env.step(action)
        one.info.update(reply.get("info") or {})
        one.context += [*one.prompt, *completion.tokens]
        one.turns.append(
            Turn(
                messages=one.shown,
                prompt=tuple(one.prompt),
                action=action,
                tokens=tuple(completion.tokens),
                logprobs=tuple(completion.logprobs),
                versions=tuple(completion.versions),
                finish=completion.finish,
                reward=reply["reward"],
            )
        )
        one.shown = messages_of(reply)
        if reply["done"]:
            one.outcome = Outcome.FINISHED
            return
        one.prompt = self.renderer.extend(completion.tokens[-1], one.shown)
        room = one.game.context - one.game.tokens - len(one.context)
        if len(one.turns) >= one.game.turns or len(one.prompt) > room:
            one.outcome = Outcome.TRUNCATED

    def _trajectory(self, one: Play) -> Trajectory:
        assert one.outcome is not None
        turns = tuple(EpisodeTurn(turn.messages, turn.action, turn.reward) for turn in one.turns)
        episode = Episode(one.id, one.game.name, one.seed, turns, one.outcome is Outcome.TRUNCATED, one.info)
        result: RewardResult = one.game.reward(episode)
        return Trajectory(
            id=one.id,
            task=one.game.name,
            group=one.group,
            member=one.member,
            seed=one.seed,
            outcome=one.outcome,
            turns=tuple(one.turns),
            reward=result.value,
            success=result.success,
            info=one.info,
        )


@dataclass(frozen=True)
class Result:
    """Held-out success before and after, the reward after, and what the steps reported."""

    before: dict[str, float]
    after: dict[str, float]
    rewards: dict[str, float]
    steps: list[dict[str, float]]


def train(
    folder: Path,
    games: Sequence[Game],
    config: TrainingConfig,
    *,
    alpha: int = 0,
    seed: int = 0,
    episodes: int = 200,
    before: dict[str, float] | None = None,
) -> Result:
    """`config.steps` batches, each trained `alpha` versions after it was sampled. `before` is the held-out success of
    the model, if it is known."""
    player, trainer = Player(folder), Trainer(folder, config, seed=seed)
    draw = random.Random(f"train {seed}")
    waiting: deque[tuple[SampleGroup, ...]] = deque()
    before = player.success(games, episodes) if before is None else before
    history = []

    def collect() -> None:
        plan = [(games[n % len(games)], draw.randrange(HELD_OUT)) for n in range(config.batch_groups)]
        waiting.append(player.groups(plan, config.group_size))

    for _ in range(alpha):
        collect()
    for step in range(config.steps):
        collect()
        metrics = trainer.step(Batch(step, waiting.popleft()))
        reward = fmean(row["reward"] for row in metrics.tasks.values())
        history.append({**metrics.values, "reward": reward})
        player.load(trainer)
    return Result(before, *player.held_out(games, episodes), history)
