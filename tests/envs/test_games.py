"""The environments that ship with rollart, and their players: in this process, without workers."""

import random
import re

import pytest

from rollart.envs import column_sum, frozen_lake, guess_number

GAMES = {
    "frozen_lake": (frozen_lake.FrozenLake, frozen_lake.player),
    "guess_number": (guess_number.GuessNumber, guess_number.player),
    "column_sum": (column_sum.ColumnSum, column_sum.player),
}
HOSTILE = ["", "\n", "x" * 10_000, "9" * 10_000, "-", "²³", "\ud800", "1e999", "left right", "ünïcödé", "0x1F", "--5"]


def play(game, seed, skill, **args):
    maker, player = GAMES[game]
    env, rng = maker(**args), random.Random(seed)
    env.reset(seed)
    total = 0.0
    while True:
        step = env.step(player(env, rng, skill=skill))
        total += step["reward"]
        if step["done"] or step.get("truncated"):
            return total, step["info"]["success"]


def success(game, skill, episodes=400):
    return sum(play(game, seed, skill)[1] for seed in range(episodes)) / episodes


@pytest.mark.parametrize(
    ("game", "bad", "middling"), [("frozen_lake", 0.35, 0.9), ("guess_number", 0.45, 0.9), ("column_sum", 0.1, 0.6)]
)
def test_a_player_is_as_good_as_its_skill(game, bad, middling):
    none, half, full = (success(game, skill) for skill in (0.0, 0.5, 1.0))
    assert full == 1.0
    assert none < bad
    assert none + 0.1 < half < middling


@pytest.mark.slow
@pytest.mark.parametrize(("game", "instance"), [
    ("frozen_lake", lambda env: tuple(env.rows)),
    ("guess_number", lambda env: (env.low, env.high)),
    ("column_sum", lambda env: env.expression),
])  # fmt: skip
def test_training_and_held_out_instances_never_meet(game, instance):
    def instances(held_out):
        env = GAMES[game][0](held_out=held_out)
        drawn = set()
        for seed in range(10_000):
            env.reset(seed)
            drawn.add(instance(env))
        return drawn

    training, held_out = instances(False), instances(True)
    assert len(training) > 300 and len(held_out) > 50
    assert not training & held_out


@pytest.mark.parametrize("game", GAMES)
def test_a_seed_gives_the_same_episode_again(game):
    maker, _ = GAMES[game]
    assert [maker().reset(seed) for seed in range(20)] == [maker().reset(seed) for seed in range(20)]
    assert len({maker().reset(seed) for seed in range(20)}) > 10


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("action", HOSTILE)
def test_no_action_can_break_an_environment(game, action):
    env = GAMES[game][0]()
    env.reset(1)
    step = env.step(action)
    assert isinstance(step["reward"], float)


@pytest.mark.parametrize("game", GAMES)
def test_the_rules_come_once_and_only_if_asked_for(game):
    maker, _ = GAMES[game]
    plain, with_rules = maker().reset(3), maker(rules=True).reset(3)
    assert with_rules.endswith(plain)
    assert len(with_rules) > len(plain) + 80


def test_a_lake_shows_its_player_and_moves_it():
    env = frozen_lake.FrozenLake()
    env.reset(0)
    env.rows = ["SFFF", "FFFF", "FFFF", "FFFG"]
    env.position = 0
    assert env.step("R")["messages"] == "_P__\n____\n____\n___G\n"
    assert env.step("down")["messages"] == "____\n_P__\n____\n___G\n"
    assert env.step("what?") == {
        "messages": "____\n_P__\n____\n___G\n", "reward": -0.01, "done": False, "truncated": False, "info": {}
    }  # fmt: skip
    for action in "RRD":
        env.step(action)
    assert env.step("D") == {
        "messages": "____\n____\n____\n___P\n", "reward": 1.0, "done": True, "truncated": False,
        "info": {"success": True},
    }  # fmt: skip


def test_a_lake_follows_gymnasiums_rules():
    gymnasium = pytest.importorskip("gymnasium.envs.toy_text.frozen_lake")
    env, rng = frozen_lake.FrozenLake(max_actions=20), random.Random(0)
    for seed in range(40):
        env.reset(seed)
        lake = gymnasium.FrozenLakeEnv(desc=env.rows, is_slippery=False)
        assert lake.reset(seed=0)[0] == env.position
        done = False
        while not done and env.actions < 20:
            move = rng.randrange(4)
            position, reward, over, _, _ = lake.step(move)
            step = env.step(frozen_lake.ACTIONS[move])
            done = step["done"]
            assert (env.position, step["reward"], done) == (position, reward, over)


def test_a_lake_ends_as_truncated_after_its_last_action():
    env = frozen_lake.FrozenLake(max_actions=2)
    env.reset(0)
    assert not env.step("?")["truncated"]
    assert env.step("?") == {**env.step("?"), "truncated": True, "info": {"success": False}}


@pytest.mark.parametrize(
    ("action", "move"),
    [
        ("L", 0),
        ("d", 1),
        ("I go Right.", 2),
        ("UP", 3),
        ("The answer is U", 3),
        ("Well, I'd go left", 0),
        ("none", None),
    ],
)
def test_moves_are_read_leniently(action, move):
    assert frozen_lake.parse(action) == move


def test_a_wrong_last_guess_earns_by_its_closeness():
    env = guess_number.GuessNumber(guesses=1, partial=0.5)
    env.reset(0)
    env.low, env.high, env.secret = 10, 19, 15
    assert env.step("12") == {"messages": "higher", "reward": 0.35, "done": True, "info": {"success": False}}
    env.left = 1
    assert env.step("15") == {"messages": "yes", "reward": 1.0, "done": True, "info": {"success": True}}
    env.left = 2
    assert env.step("90") == {"messages": "lower", "reward": 0.0, "done": False, "info": {}}


def test_the_sum_player_writes_every_column_from_right_to_left():
    env = column_sum.ColumnSum()
    for seed in range(50):
        env.reset(seed)
        *columns, total = column_sum.player(env, random.Random(seed), skill=1.0).split(";")
        for column in columns:
            left, right = re.fullmatch(r"(\d\+\d(?:\+1)?)=(\d+)", column).groups()
            assert sum(map(int, left.split("+"))) == int(right)
        assert env.step(";".join([*columns, total]))["info"]["success"]


def test_a_game_without_instances_says_what_to_change():
    with pytest.raises(ValueError, match="raise `frozen`"):
        frozen_lake.FrozenLake(frozen=0.0, size=2, max_actions=0).reset(0)
    with pytest.raises(ValueError, match="min_width <= max_width"):
        guess_number.GuessNumber(min_width=20)
