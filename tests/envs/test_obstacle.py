"""Continuous actions over the text protocol, on the task that needs no simulator."""

import json
import random

import pytest

from rollart.envs.obstacle import Obstacle, player


def played(env: Obstacle, seed: int) -> tuple[dict[str, object], list[list[float]]]:
    """The expert's last reply, and where it went."""
    path = [json.loads(env.reset(seed))[0]]
    while True:
        reply = env.step(player(env, random.Random(0)))
        path += json.loads(reply["messages"])
        if reply["done"] or reply["truncated"]:
            return reply, path


def test_the_expert_goes_around_on_either_side() -> None:
    sides = set()
    for seed in range(12):
        reply, path = played(Obstacle(), seed)
        assert reply["info"] == {"success": True, "steps": len(path) - 1}
        sides.add(path[len(path) // 2][1] > 0)
    assert sides == {True, False}


def test_straight_ahead_hits_the_obstacle() -> None:
    env = Obstacle()
    env.reset(0)
    reply = env.step(json.dumps([[1.0, 0.0]] * 60))
    assert reply["done"] and not reply["info"]["success"] and reply["info"]["steps"] < 10


def test_an_episode_depends_on_its_seed_alone_and_held_out_ones_differ() -> None:
    env = Obstacle()
    first = env.reset(3)
    played(env, 4)
    assert env.reset(3) == first
    assert Obstacle(held_out=True).reset(3) != first


def test_an_episode_goes_on_for_its_tail_and_ends_at_its_horizon() -> None:
    long, path = played(Obstacle(tail=5), 1)
    short, shorter = played(Obstacle(), 1)
    assert len(path) == len(shorter) + 5 and long["info"]["success"] and short["done"]
    cut = Obstacle(horizon=3)
    cut.reset(1)
    reply = cut.step(json.dumps([[0.0, 0.0]] * 9))
    assert reply["truncated"] and not reply["done"] and reply["info"]["steps"] == 3


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("go", "a JSON list of lists of numbers, not 'go'"),
        ("[[1, [2]]]", "a JSON list of lists of numbers"),
        ("[[1, 2, 3]]", r"\[steps, 2\] numbers, not \[1, 3\]"),
        ("[]", r"\[steps, 2\] numbers"),
        ("[[NaN, 0]]", "not a finite number"),
        ("[[1e999, 0]]", "not a finite number"),
    ],
)
def test_a_bad_chunk_is_refused_in_a_sentence(action: str, problem: str) -> None:
    env = Obstacle()
    env.reset(0)
    with pytest.raises(ValueError, match=problem):
        env.step(action)


def test_what_cannot_be_filmed_says_so() -> None:
    with pytest.raises(ValueError, match=r"need an offscreen renderer.*leave out --video"):
        Obstacle(video=64).reset(0)
