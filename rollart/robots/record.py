"""Records demonstrations: the scripted expert of a task plays training episodes; those that succeed are kept."""

import asyncio
import json
import math
from collections.abc import Callable
from dataclasses import dataclass

from rollart.config import EnvironmentsConfig
from rollart.core.errors import ConfigError, EnvironmentFailed
from rollart.core.seeds import seed_of
from rollart.envs.single import SingleEnvironment, single_environment
from rollart.robots.demonstrations import Demonstration, checked
from rollart.robots.suites import robot_task

TAIL = 10  # steps after success, so that the policy learns to stay there
MIN_RATE = 0.2  # below this, an expert is too poor to learn from


@dataclass(frozen=True, slots=True)
class Recording:
    demonstrations: tuple[Demonstration, ...]
    tried: int


async def record(
    name: str,
    episodes: int,
    seed: int,
    *,
    config: EnvironmentsConfig,
    deadline: float = 600.0,
    points: int = 0,
    on_progress: Callable[[int], None] = lambda done: None,
) -> Recording:
    """`episodes` successes of the task `suite:task`, in as many processes as `config` allows; with `points`, of
    clouds. The same seed gives the same episodes. Raises ConfigError, ServiceError or EnvironmentFailed."""
    task = robot_task(name, points=points, tail=TAIL)
    if task.player is None:
        raise ConfigError(f"{name} has no scripted expert; name recorded files with `demonstrations.path`")
    most = math.ceil(episodes / MIN_RATE)
    numbers, kept = iter(range(most)), dict[int, Demonstration]()

    async def worker() -> None:
        """Every episode that was begun is played to its end, so which ones are kept does not depend on the pace."""
        async with single_environment(task, config) as env:
            while len(kept) < episodes and (number := next(numbers, None)) is not None:
                found = await _episode(env, name, seed_of(seed, name, "demonstration", number), deadline)
                if found is not None:
                    kept[number] = found
                    on_progress(min(len(kept), episodes))

    try:
        async with asyncio.timeout(deadline), asyncio.TaskGroup() as group:
            for _ in range(min(config.processes, episodes)):
                group.create_task(worker())
    except TimeoutError:
        raise EnvironmentFailed(
            f"{len(kept)} of {episodes} demonstrations of {name} took {deadline:g} s; raise demonstrations.deadline"
        ) from None
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    if len(kept) < episodes:
        raise EnvironmentFailed(f"the expert of {name} succeeded in {len(kept)} of {most} episodes only")
    first = sorted(kept)[:episodes]
    return Recording(tuple(kept[number] for number in first), first[-1] + 1)


async def _episode(env: SingleEnvironment, name: str, seed: int, deadline: float) -> Demonstration | None:
    """The episode of a seed, or None if the expert failed."""
    first, played = await env.demonstrate(seed, deadline)
    if not played[-1][1]["info"]["success"]:
        return None
    seen = [json.loads(first)[0], *(json.loads(reply["messages"])[0] for _, reply in played[:-1])]
    done = [json.loads(action)[0] for action, _ in played]
    return checked(seen, done, f"the expert of {name}, seed {seed}")
