"""Conversations of a task's scripted player with its environment, on training instances only, in this process."""

import importlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollart.config import Task
from rollart.envs import answers
from rollart.envs.shim import make
from rollart.errors import ConfigError, EnvironmentFailed
from rollart.rollout.seeds import seed_of
from rollart.types import Episode, EpisodeTurn, Step

Player = Callable[..., str]


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """`success` is the share of episodes that the environment called a success; None if it never says."""

    episodes: tuple[Episode, ...]
    success: float | None


def demonstrate(
    task: Task,
    count: int,
    seed: int,
    *,
    deadline: float = 300.0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Demonstrations:
    """Plays `count` episodes of at most `task.max_turns` turns; `deadline` bounds them all together, in seconds."""
    player = _player(task)
    environment = make(task.env, task.args, held_out=False)
    episodes: list[Episode] = []
    end = time.monotonic() + deadline
    try:
        for number in range(count):
            if time.monotonic() > end:
                raise EnvironmentFailed(
                    f"{number} of {count} demonstrations of task {task.name!r} took {deadline:g} s; "
                    "lower model.warm_up.demonstrations or use a faster environment"
                )
            episodes.append(_play(task, environment, player, seed_of(seed, task.name, "demonstration", number)))
            on_progress(number + 1)
    finally:
        if hasattr(environment, "close"):
            environment.close()
    known = [bool(episode.info["success"]) for episode in episodes if "success" in episode.info]
    return Demonstrations(tuple(episodes), sum(known) / len(known) if known else None)


def _player(task: Task) -> Player:
    if task.player is None:
        raise ConfigError(f"task {task.name!r} has no `player`, which demonstrations need")
    module, _, name = task.player.partition(":")
    player: Player = getattr(importlib.import_module(module), name)
    return player


def _play(task: Task, environment: Any, player: Player, seed: int) -> Episode:
    # Many environments draw from the global generator, whatever seed they are given.
    random.seed(seed)
    rng = random.Random(seed)
    turns: list[EpisodeTurn] = []
    step = Step(())
    try:
        messages = answers.observation(environment.reset(seed))
        while not step.done and len(turns) < task.max_turns:
            action = player(environment, rng, **task.player_args)
            answer = environment.step(action)
            step = answers.step(list(answer) if isinstance(answer, tuple) else answer)
            turns.append(EpisodeTurn(messages, action, step.reward))
            messages = step.messages
    except answers.WrongAnswer as error:
        raise EnvironmentFailed(f"the environment of task {task.name!r} broke its protocol: {error}") from error
    truncated = step.truncated or not step.done
    return Episode(f"{task.name}-{seed}", task.name, seed, tuple(turns), truncated, step.info)
