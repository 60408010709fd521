import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollart.core.foreign import InvalidValue
from rollart.core.types import Message, Step
from rollart.envs.replies import parse_observation, parse_step

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
def test_whatever_comes_is_a_valid_step_or_an_invalid_reply(value):
    try:
        answer = parse_step(json.loads(json.dumps(value)))
    except InvalidValue:
        return
    assert isinstance(answer.done, bool) and isinstance(answer.info, dict)
    assert answer.reward is None or math.isfinite(answer.reward)
    assert answer.done or answer.messages
    assert all(isinstance(message.content, str) for message in answer.messages)


@given(JSON)
def test_whatever_comes_is_messages_or_an_invalid_reply(value):
    try:
        messages = parse_observation(value)
    except InvalidValue:
        return
    assert messages and all(isinstance(message, Message) for message in messages)


def test_a_truncated_step_is_over():
    assert parse_step({"truncated": True, "info": {"a": 1}}) == Step((Message("user", ""),), None, True, True, {"a": 1})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (["x", 0.0], r"`step` returned 2 values"),
        ("x", r"`step` returned 'x' \(str\)"),
        ({"messages": "x", "don": True}, r"unknown field 'don'; the fields are messages, reward"),
        (["x", 0.0, 1], r"`done` is 1 \(int\); expected true or false"),
        (["x", 10**400, False], r"`reward` is not finite"),
        ([None, 0.0, False], r"an observation is None"),
        ([[], 0.0, False], r"it returned no message, though the episode goes on"),
        ([[{"role": "user"}], 0.0, False], r"a message is a dict of 'role'"),
        ([[{"role": "user", "content": 5}], 0.0, False], r"the `content` of a message is 5 \(int\)"),
        ({"messages": "x", "info": [1]}, r"`info` is \[1\] \(list\)"),
    ],
)
def test_the_error_of_an_invalid_step_says_what_is_expected(value, reason):
    with pytest.raises(InvalidValue, match=reason):
        parse_step(value)


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
    with pytest.raises(InvalidValue, match=reason):
        parse_step({"messages": "x", "info": info})


def test_deep_nesting_is_refused_with_a_short_message():
    for value in (nested(900), {"messages": nested(900)}, {"k" * 10**6: 1}, [{"role": "r" * 10**6, "content": ""}] * 3):
        with pytest.raises(InvalidValue) as refused:
            parse_step(value)
        assert len(str(refused.value)) < 400


def test_lone_surrogates_and_unknown_roles_are_refused():
    with pytest.raises(InvalidValue, match="a lone surrogate"):
        parse_observation("\ud800")
    with pytest.raises(InvalidValue, match="the role of a message is 'wizard'"):
        parse_observation([{"role": "wizard", "content": "x"}])
