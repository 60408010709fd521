"""Conversations of a task's scripted player with its environment, on training seeds only.

They are played in this process or, if the task has a family, in a process with the Python of that family.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import ConfigError, EnvironmentFailed
from rollart.core.foreign import InvalidValue
from rollart.core.seeds import numbered_seed, seed_of
from rollart.core.types import Episode, EpisodeTurn, Step
from rollart.envs import replies
from rollart.envs.process_entry import EnvironmentProcess
from rollart.envs.single import single_environment

PlayEpisode = Callable[[int, float], Awaitable[Any]]
"""Plays the episode of a seed, with a deadline in seconds, and returns the raw values of the environment."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """`success` is the share of episodes that the environment reported as a success; None if it reports none."""

    episodes: tuple[Episode, ...]
    success: float | None


def demonstrate(
    task: TaskConfig,
    count: int,
    seed: int,
    *,
    deadline: float = 300.0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Demonstrations:
    """Plays `count` episodes of at most `task.max_turns` turns; `deadline` bounds them all together, in seconds."""
    if task.player is None:
        raise ConfigError(f"task {task.name!r} has no `player`, which demonstrations need")
    episodes = asyncio.run(_play(task, count, seed, deadline, on_progress))
    known = [bool(episode.info["success"]) for episode in episodes if "success" in episode.info]
    return Demonstrations(tuple(episodes), sum(known) / len(known) if known else None)


async def _play(
    task: TaskConfig, count: int, seed: int, deadline: float, on_progress: Callable[[int], None]
) -> list[Episode]:
    end, episodes = time.monotonic() + deadline, list[Episode]()
    async with _opened(task) as play:
        for number in range(count):
            left = end - time.monotonic()
            if left <= 0:
                raise EnvironmentFailed(
                    f"{number} of {count} demonstrations of task {task.name!r} took {deadline:g} s; "
                    "lower model.warmup.demonstrations or use a faster environment"
                )
            instance = (
                numbered_seed(seed, number) if task.dataset else seed_of(seed, task.name, "demonstration", number)
            )
            episodes.append(_episode(task, instance, *await play(instance, left)))
            on_progress(number + 1)
    return episodes


@asynccontextmanager
async def _opened(task: TaskConfig) -> AsyncIterator[PlayEpisode]:
    if task.family:
        async with single_environment(task, EnvironmentsConfig()) as env:
            yield env.demonstrate
        return
    with closing(EnvironmentProcess()) as process:

        async def play(seed: int, deadline: float) -> Any:
            return process.demonstrate(
                env=task.env,
                args=task.env_args,
                player=str(task.player),
                player_args=task.player_args,
                seed=seed,
                turns=task.max_turns,
            )

        yield play


def _episode(task: TaskConfig, seed: int, first: Any, played: list[tuple[str, Any]]) -> Episode:
    turns: list[EpisodeTurn] = []
    step = Step(())
    try:
        messages = replies.parse_observation(first)
        for action, answer in played:
            step = replies.parse_step(list(answer) if isinstance(answer, tuple) else answer)
            turns.append(EpisodeTurn(messages, action, step.reward))
            messages = step.messages
    except InvalidValue as error:
        raise EnvironmentFailed(f"the environment of task {task.name!r} broke its protocol: {error}") from error
    truncated = step.truncated or not step.done
    return Episode(
        id=f"{task.name}-{seed}", task=task.name, seed=seed, turns=tuple(turns), truncated=truncated, info=step.info
    )
