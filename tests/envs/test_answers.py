import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.types import Message, Step
from rollart.envs.answers import WrongAnswer, observation, step

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["messages", "reward", "done", "truncated", "info", "role", "content", "x"]), inner
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_whatever_comes_is_a_valid_step_or_a_wrong_answer(value):
    try:
        answer = step(json.loads(json.dumps(value)))
    except WrongAnswer:
        return
    assert isinstance(answer.done, bool) and isinstance(answer.info, dict)
    assert answer.reward is None or math.isfinite(answer.reward)
    assert answer.done or answer.messages
    assert all(isinstance(message.content, str) for message in answer.messages)


@given(JSON)
def test_whatever_comes_is_messages_or_a_wrong_answer(value):
    try:
        messages = observation(value)
    except WrongAnswer:
        return
    assert messages and all(isinstance(message, Message) for message in messages)


def test_a_truncated_step_is_over():
    assert step({"truncated": True, "info": {"a": 1}}) == Step((Message("user", ""),), None, True, True, {"a": 1})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (["x", 0.0], r"`step` answered 2 values"),
        ("x", r"`step` answered 'x' \(str\)"),
        ({"messages": "x", "don": True}, r"unknown field 'don'; the fields are messages, reward"),
        (["x", 0.0, 1], r"`done` is 1 \(int\); true or false"),
        (["x", 10**400, False], r"`reward` is not finite"),
        ([None, 0.0, False], r"an observation is None"),
        ([[], 0.0, False], r"it gave no message, though the episode goes on"),
        ([[{"role": "user"}], 0.0, False], r"a message is a dict of 'role'"),
        ([[{"role": "user", "content": 5}], 0.0, False], r"the `content` of a message is 5 \(int\)"),
        ({"messages": "x", "info": [1]}, r"`info` is \[1\] \(list\)"),
    ],
)
def test_a_wrong_step_says_what_is_wanted(value, reason):
    with pytest.raises(WrongAnswer, match=reason):
        step(value)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("info", "reason"),
    [({"n": 2**64}, "more than 64 bits"), ({"a": nested(40)}, "deeper than 32 levels"), ([1], r"`info` is \[1\]")],
)
def test_info_that_could_not_be_stored_is_refused(info, reason):
    with pytest.raises(WrongAnswer, match=reason):
        step({"messages": "x", "info": info})


def test_what_is_nested_without_end_is_refused_with_a_short_sentence():
    for value in (nested(900), {"messages": nested(900)}, {"k" * 10**6: 1}, [{"role": "r" * 10**6, "content": ""}] * 3):
        with pytest.raises(WrongAnswer) as refused:
            step(value)
        assert len(str(refused.value)) < 400


def test_text_that_is_no_text_and_roles_that_nobody_has_are_refused():
    with pytest.raises(WrongAnswer, match="half of a surrogate pair"):
        observation("\ud800")
    with pytest.raises(WrongAnswer, match="the role of a message is 'wizard'"):
        observation([{"role": "wizard", "content": "x"}])
