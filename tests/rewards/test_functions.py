import pytest

from rollart.core.types import Episode, EpisodeTurn, Message, RewardResult
from rollart.rewards.functions import column_sum, env_return


def episode(*actions, **info):
    return Episode(
        "e", "t", 1, tuple(EpisodeTurn((Message("user", "?"),), action, 0.25) for action in actions), info=info
    )


def test_the_return_of_the_environment_is_the_sum_of_its_rewards():
    assert env_return(episode("a", "b", success=False)) == RewardResult(0.5, success=False)
    assert env_return(episode("a")) == RewardResult(0.25, success=None)


@pytest.mark.parametrize(
    ("action", "value", "columns"),
    [
        ("7+5=12;4+8+1=13;3+2+1=6;632", 1.0, 1.0),
        ("7+5=12; 4+8+1=13; 3+2+1=6; 632", 1.0, 1.0),
        ("632", 0.8, 0.0),
        ("7+5=12;4+8+1=12;3+2+1=6;622", 0.2 * 2 / 3, 2 / 3),
        ("7+5=12;4+8+1=13;3+2+1=6;631", 0.2, 1.0),
        ("7+5=12;4+8+1=13;3+2+1=6;3+2+1=6;3+2+1=6;3+2+1=6;632", 0.8 + 0.2 / 2, 1 / 2),
        ("", 0.0, 0.0),
        ("9" * 10_000, 0.0, 0.0),
        ("7+5=" + "7" * 10_000, 0.0, 0.0),
    ],
)
def test_a_sum_earns_by_its_answer_and_by_its_right_columns(action, value, columns):
    result = column_sum(episode(action, expression="347+285", answer="632"))
    assert result.value == pytest.approx(value)
    assert result.parts["columns"] == pytest.approx(columns)
    assert result.success == (result.parts["answer"] == 1.0)
