"""Rewards that compare answers: what counts as the answer, and when two are the same."""

import shutil

import pytest

from rollart.core.types import Episode, EpisodeTurn, Message
from rollart.rewards import answers
from rollart.rewards.code import passes_tests


def episode(action: str, answer: object, **row: object) -> Episode:
    turn = EpisodeTurn((Message("user", "?"),), action, None)
    return Episode(id="e", task="t", seed=0, turns=(turn,), truncated=False, info={"answer": answer, "row": row})


@pytest.mark.parametrize(
    ("action", "answer", "same"),
    [
        ("Paris", "paris", True),
        ("  New   York ", "New York", True),
        ("I think it is <answer>Rome</answer>.", "rome", True),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        ("<think>Paris or Rome?</think>Rome", "Rome", True),
        ("<think>Rome", "Rome", False),
        ("Rome, I think", "Rome", False),
        ("Rome.", "rome", True),
        ("Rome", "Rome.", True),
        ("", ".", False),
        ("", "Rome", False),
    ],
)
def test_exact(action: str, answer: str, same: bool) -> None:
    assert answers.exact(episode(action, answer)).success is same


def test_exact_takes_the_last_match_of_a_pattern() -> None:
    settings = {"pattern": r"Answer: (\w+)"}
    assert answers.exact(episode("Answer: a. No. Answer: b.", "b"), **settings).value == 1.0
    assert answers.exact(episode("b", "b"), **settings).value == 0.0


@pytest.mark.parametrize(
    ("action", "answer", "same"),
    [
        ("It is 42.", "6 * 7 = 42\n#### 42", True),
        ("1,234.50 dollars", "1234.5", True),
        ("-3", "3", False),
        ("no idea", "3", False),
        (r"\boxed{7}, not 8", "7", True),
    ],
)
def test_number(action: str, answer: str, same: bool) -> None:
    assert answers.number(episode(action, answer)).success is same


def test_an_answer_without_a_number_is_an_error_and_not_a_reward_of_0() -> None:
    with pytest.raises(ValueError, match="no number"):
        answers.number(episode("3", "three"))


@pytest.mark.parametrize(
    ("action", "answer", "same"),
    [
        (r"The answer is $\frac{1}{2}$.", "0.5", True),
        (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", True),
        (r"\boxed{3}", r"\boxed{4}", False),
        ("no idea", "4", False),
    ],
)
def test_math(action: str, answer: str, same: bool) -> None:
    pytest.importorskip("math_verify")
    assert answers.math(episode(action, answer)).success is same


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize(
    ("action", "passed"),
    [
        ("```python\ndef add(a, b):\n    return a + b\n```", True),
        ("def add(a, b):\n    return a - b", False),
        ("import sys\nsys.exit(0)", False),
        ("while True: pass", False),
        ("```python\ndef add(a, b:\n```", False),
    ],
)
def test_code_passes_only_if_the_tests_ran_to_their_end(action: str, passed: bool) -> None:
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
    deadline = 60.0 if passed else 3.0  # a busy machine must not fail what is right
    assert passes_tests(episode(action, "", tests=tests), tests="tests", deadline=deadline).success is passed
