"""Datasets of reasoning-gym through the adapter, with their own scores."""

import random

import pytest

from rollart.envs.adapters.reasoning_gym import ReasoningGym, player

pytest.importorskip("reasoning_gym")


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown", "spell_backward", "mini_sudoku", "leg_counting", "gcd"])
def test_the_reference_answer_scores_one_and_none_scores_less(dataset) -> None:
    env, rng = ReasoningGym(dataset), random.Random(0)
    for seed in range(3):
        assert env.reset(seed)
        assert env.step(player(env, rng))["info"]["success"]
        assert env.step(player(env, rng, skill=0.0))["reward"] < 1.0


def test_scores_are_graded_and_tags_hold_the_answer() -> None:
    env = ReasoningGym("chain_sum", tags=True)
    assert env.reset(0).endswith("between <answer> and </answer>.")
    answer = env.entry["answer"]
    assert env.step(f"So it is <answer>{answer}</answer>.")["reward"] == 1.0
    assert 0.0 < env.step(f"The answer is {answer}")["reward"] < 1.0
    assert env.step("no idea")["reward"] < 1.0


def test_the_settings_of_a_dataset_count() -> None:
    question = ReasoningGym("chain_sum", config={"min_terms": 6, "max_terms": 6}).reset(0)
    assert sum(question.count(sign) for sign in "+-") == 5


def test_a_seed_gives_the_same_question_and_held_out_ones_differ() -> None:
    training = [ReasoningGym("chain_sum").reset(seed) for seed in range(100)]
    assert training == [ReasoningGym("chain_sum").reset(seed) for seed in range(100)]
    held_out = {ReasoningGym("chain_sum", held_out=True).reset(seed) for seed in range(100)}
    assert len(set(training)) > 95 and not set(training) & held_out
