import random

import pytest

from rollart.config import TaskConfig
from rollart.envs.directory import RULES, Directory, belongs_to_held_out, player
from rollart.warmup.demonstrations import demonstrate


def test_a_look_up_and_its_city_win() -> None:
    env = Directory()
    opening = env.reset(0)
    assert opening[-1] == {"role": "user", "content": f"Where does {env.person} live?"}
    found = env.step(f"lookup {env.person}")
    assert found == {"messages": f"{env.person} lives in {env.city[env.person]}.", "reward": 0.0, "done": False}
    end = env.step(f" Answer {env.city[env.person].lower()}. ")
    assert (end["reward"], end["done"], end["info"]) == (1.0, True, {"success": True})


@pytest.mark.parametrize("last", ["answer Atlantis", "lookup Anna", "I do not know."])
def test_a_wrong_city_and_a_wasted_last_turn_lose(last: str) -> None:
    env = Directory(turns=3)
    env.reset(0)
    assert env.step("hello")["messages"] == RULES
    assert env.step("lookup Nobody")["messages"] == "Nobody is not listed."
    end = env.step(last)
    assert (end["reward"], end["done"], end["info"]) == (0.0, True, {"success": False})


def test_talk_around_a_command_is_not_a_command() -> None:
    env = Directory()
    env.reset(0)
    assert env.step(f"I would lookup {env.person}")["messages"] == RULES
    assert not env.looked_up


@pytest.mark.parametrize("held_out", [False, True])
def test_training_and_held_out_questions_never_meet(held_out: bool) -> None:
    env = Directory(held_out=held_out)
    asked = set()
    for seed in range(300):
        env.reset(seed)
        asked.add((env.person, env.city[env.person]))
    assert len(asked) > 50
    assert {belongs_to_held_out(*pair) for pair in asked} == {held_out}


def test_the_same_seed_asks_the_same_question() -> None:
    first, again = Directory(), Directory()
    assert (first.reset(5), first.city) == (again.reset(5), again.city)


def test_a_skilled_player_wins_and_an_unskilled_one_guesses() -> None:
    env = Directory()
    env.reset(3)
    assert player(env, random.Random(0), skill=1.0) == f"lookup {env.person}"
    for skill, low, high in ((1.0, 1.0, 1.0), (0.0, 0.0, 0.15)):
        task = TaskConfig(
            name="directory",
            env="rollart.envs.directory:Directory",
            player="rollart.envs.directory:player",
            player_args={"skill": skill},
            max_turns=2,
        )
        assert low <= (demonstrate(task, 200, seed=0).success or 0.0) <= high


def test_one_turn_is_too_few() -> None:
    with pytest.raises(ValueError, match="turns >= 2"):
        Directory(turns=1)
