"""Rewards that programs write to files."""

import pytest

from rollart.sandbox.reward_file import parse_reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1\n", 1.0), ("0.25", 0.25), ("true", 1.0), ('{"reward": 0.5, "letters": 3}', 0.5), ("-2e1", -20.0)],
)
def test_a_number_or_an_object_with_one_is_a_reward(text: str, reward: float) -> None:
    assert parse_reward(text, "reward.txt")["reward"] == reward


@pytest.mark.parametrize(
    "text", ["", "pass", "NaN", "Infinity", "[1]", '{"score": 1}', '{"reward": "1"}', "null", "1 2"]
)
def test_anything_else_is_no_reward_rather_than_zero(text: str) -> None:
    found = parse_reward(text, "reward.txt")
    assert found["reward"] is None
    assert "reward.txt" in found["info"]["no_reward"]


def test_other_values_are_kept_in_info() -> None:
    found = parse_reward('{"accuracy": 0.5, "speed": 2, "success": true}', "reward.json", key="accuracy")
    assert found == {"reward": 0.5, "success": True, "info": {"speed": 2}}
