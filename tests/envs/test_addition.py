import random

import pytest

from rollart.envs.addition import Addition, belongs_to_held_out, player


def test_the_last_number_of_the_reply_counts() -> None:
    env = Addition()
    assert env.reset(0)[-1] == {"role": "user", "content": f"{env.terms[0]} + {env.terms[1]} ="}
    total = sum(env.terms)
    replies = {f"{total}": True, f"1 + 1 = {total}.": True, f"{total} or 0": False, f"-{total}0": False, "many": False}
    for reply, success in replies.items():
        answer = env.step(reply)
        assert (answer["reward"], answer["done"], answer["info"]) == (float(success), True, {"success": success})


@pytest.mark.parametrize("held_out", [False, True])
def test_training_and_held_out_sums_never_meet_in_any_order(held_out: bool) -> None:
    env = Addition(held_out=held_out)
    for seed in range(300):
        env.reset(seed)
        first, second = env.terms
        assert belongs_to_held_out(first, second) == belongs_to_held_out(second, first) == held_out


def test_the_same_seed_gives_the_same_sum() -> None:
    assert Addition().reset(4) == Addition().reset(4) != Addition().reset(5)


def test_a_players_mistakes_are_as_many_as_its_skill_says() -> None:
    env, rng = Addition(), random.Random(0)
    right = 0
    for seed in range(400):
        env.reset(seed)
        right += env.step(player(env, rng, skill=0.7))["info"]["success"]
    assert 0.6 < right / 400 < 0.8


def test_numbers_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(ValueError, match="low < high"):
        Addition(low=5, high=5)
