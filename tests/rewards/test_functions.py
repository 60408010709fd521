import pytest

from rollart.rewards.functions import chain_sum, env_return
from rollart.types import Episode, EpisodeTurn, Message, RewardResult


def episode(*actions, **info):
    return Episode(
        "e", "t", 1, tuple(EpisodeTurn((Message("user", "?"),), action, 0.25) for action in actions), info=info
    )


def test_the_return_of_the_environment_is_the_sum_of_its_rewards():
    assert env_return(episode("a", "b", success=False)) == RewardResult(0.5, success=False)
    assert env_return(episode("a")) == RewardResult(0.25, success=None)


@pytest.mark.parametrize(
    ("action", "value", "steps"),
    [
        ("25+47=72;72-80=-8;-8+5=-3", 1.0, 1.0),
        ("25 + 47 = 72\n72 - 80 = -8\n-8 + 5 = -3", 1.0, 1.0),
        ("-3", 0.8, 0.0),
        ("25+47=71;71-80=-9;-9+5=-4", 0.2 * 2 / 3, 2 / 3),
        ("25+47=72;70-80=-10;-10+5=-3", 0.8 + 0.2 / 3, 1 / 3),
        ("25+47=72;72-80=-8;-8+5=-3;-3+0=-3;-3+0=-3;-3+0=-3", 0.8 + 0.2 / 2, 1 / 2),
        ("", 0.0, 0.0),
        ("9" * 10_000, 0.0, 0.0),
        ("25+47=" + "7" * 10_000, 0.0, 0.0),
    ],
)
def test_a_sum_earns_by_its_answer_and_by_its_right_steps(action, value, steps):
    result = chain_sum(episode(action, expression="25+47-80+5", answer="-3"))
    assert result.value == pytest.approx(value)
    assert result.parts["steps"] == pytest.approx(steps)
    assert result.success == (result.parts["answer"] == 1.0)
