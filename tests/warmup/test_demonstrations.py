import random
from typing import Any

import pytest

from rollart.config import TaskConfig
from rollart.core.errors import ConfigError, EnvironmentFailed
from rollart.core.types import Message
from rollart.warmup.demonstrations import demonstrate

HERE = __name__


class Countdown:
    """Ends after a given number of steps; `step` returns a tuple."""

    def __init__(self, length: int = 2, held_out: bool = False) -> None:
        assert not held_out
        self.length, self.closed, self.left = length, False, 0

    def reset(self, seed: int) -> str:
        self.left = self.length
        return f"start {seed} {random.random()}"

    def step(self, action: str) -> Any:
        self.left -= 1
        return f"{self.left} left after {action}", 0.5, self.left == 0

    def close(self) -> None:
        self.closed = True


class Judge(Countdown):
    def step(self, action: str) -> Any:
        return {"messages": [], "reward": 1.0, "done": True, "info": {"success": action == "good"}}


class Broken(Countdown):
    def step(self, action: str) -> Any:
        return "only text"


def player(env: Any, rng: random.Random, *, skill: float) -> str:
    return "good" if rng.random() < skill else "bad"


def task(env: str, **more: Any) -> TaskConfig:
    given = {"name": "t", "env": f"{HERE}:{env}", "player": f"{HERE}:player", "player_args": {"skill": 0.5}} | more
    return TaskConfig.model_validate({"max_turns": 5} | given)


def test_an_episode_holds_what_was_seen_and_done() -> None:
    (episode,) = demonstrate(task("Countdown"), 1, seed=0).episodes
    first, second = episode.turns
    assert first.messages[0].content.startswith(f"start {episode.seed} ")
    assert second.messages == (Message("user", f"1 left after {first.action}"),)
    assert (first.reward, second.reward, episode.truncated) == (0.5, 0.5, False)


def test_the_same_seed_plays_the_same_episodes_and_another_does_not() -> None:
    first, again, other = (demonstrate(task("Countdown"), 20, seed).episodes for seed in (0, 0, 1))
    assert first == again
    assert {episode.seed for episode in first}.isdisjoint(episode.seed for episode in other)


def test_an_endless_episode_is_cut_at_the_last_turn() -> None:
    (episode,) = demonstrate(task("Countdown", args={"length": 99}), 1, seed=0).episodes
    assert (len(episode.turns), episode.truncated) == (5, True)


def test_success_is_the_share_that_the_environment_reports() -> None:
    made = demonstrate(task("Judge"), 200, seed=0)
    assert made.success == sum(episode.turns[0].action == "good" for episode in made.episodes) / 200
    assert 0.3 < made.success < 0.7
    assert demonstrate(task("Countdown"), 3, seed=0).success is None


def test_progress_counts_every_episode() -> None:
    seen: list[int] = []
    demonstrate(task("Judge"), 3, seed=0, on_progress=seen.append)
    assert seen == [1, 2, 3]


def test_a_broken_environment_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match=r"task 't' broke its protocol.*'only text'"):
        demonstrate(task("Broken"), 1, seed=0)


def test_the_deadline_ends_a_slow_task() -> None:
    with pytest.raises(EnvironmentFailed, match=r"0 of 5 demonstrations of task 't' took -1 s"):
        demonstrate(task("Judge"), 5, seed=0, deadline=-1)


def test_a_task_without_a_player_cannot_be_demonstrated() -> None:
    with pytest.raises(ConfigError, match="has no `player`"):
        demonstrate(task("Judge", player=None), 1, seed=0)
