"""Real episodes of packages that have a Python of their own, in processes such as a run uses."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollart.config import Environments, Task
from rollart.envs.pool import EnvironmentPool
from rollart.envs.stage import Stage, stage
from rollart.types import Message, Step

ADAPTERS = "rollart.envs.adapters"
CONFIG = Environments(slots=2, reset_deadline=120, step_deadline=60)
HOSTILE = ["", "\n", "\\", "quit", "restart", "x" * 20_000, '{"name": ' * 2000, "[[[", "\\boxed{}", "\x00\x1b[31m"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    family: str
    env: str
    args: dict[str, Any] = field(default_factory=dict)

    def task(self, **more: Any) -> Task:
        module = f"{ADAPTERS}.{self.env.partition(':')[0]}"
        player = {"player": f"{module}:player", "player_args": {"skill": 1.0}}
        return Task(name="game", env=f"{ADAPTERS}.{self.env}", args=self.args, family=self.family, **player, **more)


CASES = [
    Case("textarena", "textarena:TextArena", {"game": "GuessTheNumber-v0"}),
    Case("gem", "gem:Gem", {"id": "game:TowerofHanoi-v0-easy"}),
    Case("textworld", "textworld:TextWorld", {"rooms": 2, "objects": 3, "quest_length": 2, "games": 2}),
    Case("bfcl", "bfcl:Bfcl"),
    Case("alfworld", "alfworld:AlfWorld"),
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)


async def episode(env: Stage, seed: int, held_out: bool = False, turns: int = 60) -> tuple[Sequence[Message], Step]:
    """Played by the scripted player; everything that was seen, and the last step."""
    seen = [*await env.reset(seed, held_out)]
    for turn in range(turns):
        step = await env.step(await env.scripted(turn))
        seen += step.messages
        if step.done:
            return seen, step
    raise AssertionError(f"the episode was not over after {turns} turns")


@each
def test_a_scripted_player_solves_every_episode(case: Case, family: Callable[[str], str]) -> None:
    async def play() -> list[Step]:
        async with stage(case.task(), CONFIG) as env:
            return [(await episode(env, seed, held_out))[1] for seed in range(3) for held_out in (False, True)]

    family(case.family)
    for step in asyncio.run(play()):
        assert step.info["success"] is True
        assert step.reward == 1.0 and not step.truncated


@each
def test_a_seed_is_the_same_episode_in_any_process_and_held_out_ones_differ(
    case: Case, family: Callable[[str], str]
) -> None:
    async def play(held_out: bool) -> list[Sequence[Message]]:
        async with stage(case.task(), CONFIG) as env:
            return [(await episode(env, seed, held_out))[0] for seed in (4, 5)]

    family(case.family)
    training = asyncio.run(play(False))
    assert training == asyncio.run(play(False))
    if case.family != "gem":  # the towers always begin alike
        assert training[0] != training[1]
        assert not any(seen in training for seen in asyncio.run(play(True)))


@each
def test_no_action_breaks_an_environment(case: Case, family: Callable[[str], str]) -> None:
    async def play() -> None:
        async with stage(case.task(), CONFIG) as env:
            for action in HOSTILE:
                await env.reset(0, held_out=False)
                await env.step(action)

    family(case.family)
    asyncio.run(play())


def test_the_pool_of_a_run_uses_the_python_of_the_family(family: Callable[[str], str]) -> None:
    case = CASES[0]

    async def play() -> Step:
        pool = EnvironmentPool([case.task()], CONFIG)
        await pool.start()
        try:
            async with pool.lease("game", held_out=False) as env:
                await env.reset(0)
                steps = [await env.step(f"[{guess}]") for guess in (1, 1, 1)]
                return steps[-1]
        finally:
            await pool.close()

    family(case.family)
    assert asyncio.run(play()).done  # the same guess twice is against the rules of the game


def test_two_players_take_turns_and_either_may_begin(family: Callable[[str], str]) -> None:
    case = Case("textarena", "textarena:TextArena", {"game": "TicTacToe-v0", "players": 2})

    async def play() -> list[tuple[Sequence[Message], Step]]:
        async with stage(case.task(), CONFIG) as env:
            return [await episode(env, seed) for seed in range(12)]

    family("textarena")
    games = asyncio.run(play())
    assert {step.info["seat"] for _, step in games} == {0, 1}
    assert {step.reward for _, step in games} >= {-1.0, 1.0}
    for seen, step in games:
        assert step.info["success"] == (step.reward == 1.0)
        mine, other = step.info["seat"], 1 - step.info["seat"]
        told = "\n".join(message.content for message in seen)
        assert f"You are Player {mine}" in told and f"You are Player {other}" not in told
        assert f"Player {other}: [" in told and f"Player {mine}: [" not in told


def test_bfcl_rewards_the_state_that_was_asked_for_and_nothing_less(family: Callable[[str], str]) -> None:
    case = Case("bfcl", "bfcl:Bfcl", {"max_calls": 6})

    async def play(action: str) -> Step:
        async with stage(case.task(), CONFIG) as env:
            await env.reset(1, held_out=False)
            for _ in itertools.repeat(None, 12):
                step = await env.step(action)
                if step.done:
                    return step
        raise AssertionError("it never ended")

    family("bfcl")
    idle = asyncio.run(play("I have done everything."))
    assert (idle.reward, idle.truncated, idle.info["calls"]) == (0.0, False, 0)
    for action in (
        '{"name": "open", "arguments": {"file": "/tmp/x", "mode": "w"}}',
        '{"name": "_begin", "arguments": {}}',
    ):
        step = asyncio.run(play(action))
        assert (step.reward, step.truncated, step.info["calls"]) == (0.0, True, 0)
