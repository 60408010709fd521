"""Real episodes of packages that have a Python of their own, in processes such as a run uses."""

import asyncio
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollart.config import EnvironmentsConfig, TaskConfig, TinyModelConfig
from rollart.core.errors import EnvironmentFailed
from rollart.core.types import Message, Step
from rollart.envs.pool import EnvironmentPool
from rollart.envs.remote_host import KEY
from rollart.envs.single import SingleEnvironment, single_environment
from rollart.models import tiny
from rollart.warmup.demonstrations import demonstrate

ADAPTERS = "rollart.envs.adapters"
CONFIG = EnvironmentsConfig(processes=2, reset_deadline=120, step_deadline=60)
HOSTILE = ["", "\n", "\\", "quit", "restart", "x" * 20_000, '{"name": ' * 2000, "[[[", "\\boxed{}", "\x00\x1b[31m"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    family: str
    env: str
    args: dict[str, Any] = field(default_factory=dict)

    def task(self, **more: Any) -> TaskConfig:
        module = f"{ADAPTERS}.{self.env.partition(':')[0]}"
        player = {"player": f"{module}:player", "player_args": {"skill": 1.0}}
        return TaskConfig(
            name="game", env=f"{ADAPTERS}.{self.env}", args=self.args, family=self.family, **player, **more
        )


CASES = [
    Case("textarena", "textarena:TextArena", {"game": "GuessTheNumber-v0"}),
    Case("gem", "gem:Gem", {"id": "game:TowerofHanoi-v0-easy"}),
    Case("textworld", "textworld:TextWorld", {"rooms": 2, "objects": 3, "quest_length": 2, "games": 2}),
    Case("bfcl", "bfcl:Bfcl"),
    Case("alfworld", "alfworld:AlfWorld"),
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.family)


async def episode(
    env: SingleEnvironment, seed: int, held_out: bool = False, turns: int = 60
) -> tuple[Sequence[Message], Step]:
    """Played by the scripted player; everything that was seen, and the last step."""
    seen = [*await env.reset(seed, held_out)]
    for turn in range(turns):
        step = await env.step(await env.scripted(turn))
        seen += step.messages
        if step.done:
            return seen, step
    raise AssertionError(f"the episode was not over after {turns} turns")


@contextmanager
def served(command: list[str], lines: int = 1, **environment: str) -> Iterator[list[str]]:
    """A `rollart` command that serves, and the words of its first lines."""
    rollart = str(Path(sys.executable).with_name("rollart"))
    process = subprocess.Popen([rollart, *command], stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert process.stdout is not None
        yield " ".join(itertools.islice(process.stdout, lines)).split()
    finally:
        process.terminate()
        process.communicate(timeout=30)


@each
def test_a_scripted_player_solves_every_episode(case: Case, family: Callable[[str], str]) -> None:
    async def play() -> list[Step]:
        async with single_environment(case.task(), CONFIG) as env:
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
        async with single_environment(case.task(), CONFIG) as env:
            return [(await episode(env, seed, held_out))[0] for seed in (4, 5)]

    family(case.family)
    training = asyncio.run(play(False))
    assert training == asyncio.run(play(False))
    if case.family != "gem":  # the towers always begin alike
        assert training[0] != training[1]
        assert not any(seen in training for seen in asyncio.run(play(True)))


@each
def test_after_an_episode_that_was_left_in_the_middle_a_reused_environment_is_as_good_as_new(
    case: Case, family: Callable[[str], str]
) -> None:
    async def play() -> tuple[Sequence[Message], Sequence[Message]]:
        async with single_environment(case.task(), CONFIG) as env:
            new, _ = await episode(env, 4)
            await env.reset(5, held_out=False)
            await env.step(await env.scripted(0))
            await env.step("x" * 2000)
            used, _ = await episode(env, 4)
            return new, used

    family(case.family)
    new, used = asyncio.run(play())
    assert new == used


@each
def test_no_action_breaks_an_environment(case: Case, family: Callable[[str], str]) -> None:
    async def play() -> None:
        async with single_environment(case.task(), CONFIG) as env:
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
            async with pool.claim("game", held_out=False) as env:
                await env.reset(0)
                steps = [await env.step(f"[{guess}]") for guess in (1, 1, 1)]
                return steps[-1]
        finally:
            await pool.close()

    family(case.family)
    assert asyncio.run(play()).done  # the same guess twice is against the rules of the game


def test_a_run_without_the_family_plays_in_a_host_that_has_it(
    family: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.family == "gem")
    family(case.family)
    monkeypatch.setenv(KEY, "secret")

    async def play(url: str) -> Sequence[Message]:
        pool = EnvironmentPool([case.task()], CONFIG, urls=[url])
        try:
            await pool.start()
            async with pool.claim("game", held_out=False) as env:
                return await env.reset(0)
        finally:
            await pool.close()

    with served(["envs", "serve", "--port", "0", "--family", case.family]) as words:
        monkeypatch.setenv("ROLLART_ENVS", str(tmp_path))  # where there is none
        assert "tower" in asyncio.run(play(words[-1]))[0].content.lower()


def test_two_players_take_turns_and_either_may_begin(family: Callable[[str], str]) -> None:
    case = Case("textarena", "textarena:TextArena", {"game": "TicTacToe-v0", "players": 2})

    async def play() -> list[tuple[Sequence[Message], Step]]:
        async with single_environment(case.task(), CONFIG) as env:
            return [await episode(env, seed) for seed in range(12)]

    family("textarena")
    games = asyncio.run(play())
    assert {step.info["seat"] for _, step in games} == {0, 1}
    assert {step.reward for _, step in games} >= {-1.0, 1.0}
    for seen, step in games:
        assert step.info["success"] == (step.reward == 1.0)
        mine, other = step.info["seat"], 1 - step.info["seat"]
        shown = "\n".join(message.content for message in seen)
        assert f"You are Player {mine}" in shown and f"You are Player {other}" not in shown
        assert f"Player {other}: [" in shown and f"Player {mine}: [" not in shown


def test_a_frozen_policy_of_ours_can_be_the_opponent(
    family: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Untrained, it never finds a move and loses by the rules; games that it loses as the first to move begin again."""
    tiny.make(TinyModelConfig(layers=1, hidden=32, heads=2, context=4096), tmp_path / "rival", seed=0)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")

    async def play(url: str) -> list[tuple[Sequence[Message], Step]]:
        opponent = {"opponent": f"{ADAPTERS}.opponents:Served", "opponent_args": {"url": url, "model": "rival"}}
        args = {"game": "TicTacToe-v0", "players": 2, **opponent}
        task = Case("textarena", "textarena:TextArena", args).task(pass_env=["OPENAI_API_KEY"])
        async with single_environment(task, CONFIG) as env:
            return [await episode(env, seed) for seed in range(4)]

    family("textarena")
    with served(["serve", "--model", str(tmp_path / "rival"), "--port", "0"], 2, ROLLART_API_KEY="sesame") as words:
        url = words[-1]
        games = asyncio.run(play(url))
    assert all(step.reward == 1.0 and "does not follow the correct format" in step.info["reason"] for _, step in games)
    assert {step.info["seat"] for _, step in games} == {0}
    with pytest.raises(EnvironmentFailed, match="the opponent rival did not reply at"):
        asyncio.run(play(url))


def test_demonstrations_of_a_warmup_come_from_the_family_of_the_task(family: Callable[[str], str]) -> None:
    case = next(case for case in CASES if case.family == "gem")
    family(case.family)
    assert importlib.util.find_spec("gem") is None, "the test shows nothing if our own Python has the package"
    done: list[int] = []
    made, again = (demonstrate(case.task(max_turns=20), 3, seed=0, on_progress=done.append) for _ in range(2))
    assert made == again and done == [1, 2, 3] * 2
    assert made.success == 1.0 and all(len(episode.turns) > 1 for episode in made.episodes)


def test_a_tool_that_was_missed_is_shown_when_it_comes_and_cannot_be_called_before(
    family: Callable[[str], str],
) -> None:
    case = Case("bfcl", "bfcl:Bfcl", {"category": "miss_func"})

    async def play(seed: int) -> tuple[str, Sequence[Message], Step]:
        async with single_environment(case.task(), CONFIG) as env:
            begin = await env.reset(seed, False)
            tools = {line.split('"')[3] for line in begin[0].content.splitlines() if line.startswith('{"name"')}
            seen, last = await episode(env, seed)
            new = next(
                line.split('"')[3]
                for message in seen[2:]
                for line in message.content.splitlines()
                if line.startswith('{"name"')
            )
            assert new not in tools
            early = await env.reset(seed, False) and await env.step(f'{{"name": "{new}", "arguments": {{}}}}')
            return early.messages[0].content, seen, last

    family("bfcl")
    for seed in range(3):
        early, seen, last = asyncio.run(play(seed))
        assert early.startswith("There is no tool")
        assert any(message.content.endswith("What about now?") for message in seen)
        assert last.info["success"] is True and last.reward == 1.0


def test_bfcl_rewards_the_requested_state_and_nothing_less(family: Callable[[str], str]) -> None:
    case = Case("bfcl", "bfcl:Bfcl", {"max_calls": 6})

    async def play(action: str) -> Step:
        async with single_environment(case.task(), CONFIG) as env:
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
