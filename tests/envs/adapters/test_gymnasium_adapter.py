"""Gymnasium's own environments, played in text through the adapter."""

import random

import pytest

from rollart.envs.adapters.gymnasium import Gymnasium, player

gymnasium = pytest.importorskip("gymnasium")
SPACES = gymnasium.spaces


def test_a_toy_text_game_is_shown_as_its_picture_with_the_player_marked() -> None:
    env = Gymnasium("FrozenLake-v1", options={"is_slippery": False}, success=1.0)
    assert env.reset(0).endswith("\n[S]FFF\nFHFH\nFFFH\nHFFG")
    for move in ("down", "down", "RIGHT", "I go down"):
        step = env.step(move)
        assert not step["done"]
    assert "HF[F]G" not in step["messages"] and "H[F]FG" in step["messages"]
    env.step("right")
    assert env.step("2") == {
        "messages": "  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G]",
        "reward": 1.0,
        "info": {"success": True},
        "done": True,
        "truncated": False,
    }


def test_the_taxi_its_passenger_and_the_destination_look_different() -> None:
    seen = Gymnasium("Taxi-v4").reset(1)
    picture = seen.splitlines()[1:]
    assert "\x1b" not in seen
    for bracket in "[(<":
        assert sum(line.count(bracket) for line in picture) == 1


def test_an_environment_without_a_picture_is_shown_as_numbers() -> None:
    env = Gymnasium("Blackjack-v1", rules=False)
    first = env.reset(3)
    assert first.startswith("[") and len(first.split(",")) == 3
    assert env.step("stick")["done"]


@pytest.mark.parametrize(
    ("space", "said", "action"),
    [
        (SPACES.Discrete(3), "it is 2.", 2),
        (SPACES.Discrete(3, start=5), "7", 7),
        (SPACES.Discrete(3), "3", None),
        (SPACES.Box(-1.0, 1.0, (2,)), "[0.5, -1e0]", [0.5, -1.0]),
        (SPACES.Box(-1.0, 1.0, (2,)), "first 0.1, no: 0.25 0.5", [0.25, 0.5]),
        (SPACES.Box(-1.0, 1.0, (2,)), "0.5 1.5", None),
        (SPACES.Box(-1.0, 1.0, (2,)), "0.5", None),
        (SPACES.Box(0, 9, (2, 2), dtype="int64"), "1 2 3 4", [[1, 2], [3, 4]]),
        (SPACES.MultiDiscrete([2, 5]), "1 and 4", [1, 4]),
        (SPACES.MultiDiscrete([2, 5]), "1 and 4.5", None),
        (SPACES.MultiBinary(3), "0 1 1", [0, 1, 1]),
        (SPACES.MultiBinary(3), "0 1 2", None),
    ],
)
def test_actions_of_every_plain_space_are_read(space, said, action) -> None:
    env = Gymnasium("Pendulum-v1")
    env.env.action_space = space
    read = env.parse(said)
    assert (read if action is None or isinstance(action, int) else read.tolist()) == action
    assert env.instruction().startswith("Answer with ")


def test_an_action_that_cannot_be_read_costs_what_it_should_and_changes_nothing() -> None:
    env = Gymnasium("CliffWalking-v1", unreadable=-0.5)
    picture = env.reset(0).partition("\n")[2]
    step = env.step("what?")
    assert (step["reward"], step["done"]) == (-0.5, False)
    assert step["messages"].endswith(picture)


def test_the_time_limit_of_the_environment_truncates() -> None:
    env = Gymnasium("Pendulum-v1", options={"max_episode_steps": 3})
    env.reset(0)
    ends = [env.step("0")["truncated"] for _ in range(3)]
    assert ends == [False, False, True]


def test_a_seed_gives_the_same_episode_and_held_out_ones_differ() -> None:
    def start(seed: int, held_out: bool = False) -> str:
        return Gymnasium("CartPole-v1", held_out=held_out).reset(seed)

    training = [start(seed) for seed in range(30)]
    assert training == [start(seed) for seed in range(30)]
    assert not set(training) & {start(seed, held_out=True) for seed in range(30)}


@pytest.mark.parametrize(
    "id", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1", "MountainCarContinuous-v0"]
)
def test_the_random_player_can_always_be_read(id) -> None:
    env, rng = Gymnasium(id, unreadable=-99.0), random.Random(0)
    env.reset(0)
    for _ in range(50):
        step = env.step(player(env, rng))
        assert step["reward"] != -99.0
        if step["done"] or step["truncated"]:
            env.reset(0)


@pytest.mark.parametrize("action", ["", "9" * 5000, "1e999", "nan", "-", "\ud800", "²", "[[[["])
def test_no_action_breaks_it(action) -> None:
    for id in ("FrozenLake-v1", "Pendulum-v1"):
        env = Gymnasium(id)
        env.reset(0)
        assert isinstance(env.step(action)["reward"], float)


def test_a_wrong_number_of_names_is_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="`actions` has 2 names"):
        Gymnasium("FrozenLake-v1", actions=["left", "right"])
