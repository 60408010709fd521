"""Whatever a model writes, every parser of it returns: a failure would drop what should be penalised."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from rollart.core.action import Tool
from rollart.core.foreign import parse_json, parse_json_at
from rollart.core.types import Episode, EpisodeTurn, Message
from rollart.envs.adapters import mcp
from rollart.envs.addition import Addition
from rollart.envs.column_sum import ColumnSum
from rollart.envs.frozen_lake import FrozenLake
from rollart.envs.guess_number import GuessNumber
from rollart.envs.terminal.environment import parse as parse_command
from rollart.models import tool_calls as tools
from rollart.rewards import functions

DEEP = [character * count for character in "[{(<`\"'\\" for count in (900, 1100, 20_000)]
NESTED = ['{"a":' * depth + "1" + "}" * depth for depth in (31, 900, 3000)]
ODD = [
    *("", " " * 50_000, "\n" * 50_000, "1" * 5000, "-" * 5000, "1e999", "NaN", "null", "\x00", "\ud800", "٣" * 50),
    *(
        "<tool_call>" * 3000,
        "<parameter=a>" * 5000,
        "<function=f>" * 3000,
        "```\n" * 5000,
        "[TOOL_CALLS]" * 2000,
        "<arg_key>" * 5000,
    ),
    *("<tool_call>" + " " * 50_000, "[ARGS]{" * 3000, '{"name": ' * 2000, "<|im_end|>" * 500),
]
WRAPS = [
    "{}",
    "<tool_call>{}</tool_call>",
    "<tool_call>{}",
    '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
    '{{"name": "f", "parameters": {}}}',
    "[TOOL_CALLS]{}",
    "[TOOL_CALLS]f[ARGS]{}",
    "<tool_call><function=f><parameter=x>{}</parameter></function></tool_call>",
    "<answer>{}</answer>",
    "```bash\n{}\n```",
]
TEXTS = [wrap.format(inside) for wrap in WRAPS for inside in (*DEEP, *NESTED, *ODD)]
FORMATS = (
    *(tools.Tagged, tools.Bare, tools.Listed, tools.Named, tools.Marked),
    *(tools.Keyed, tools.Separated, tools.Fenced),
)
TOOL = Tool("f", "", {"type": "object", "properties": {"x": {"type": "number"}}})


@pytest.mark.parametrize("kind", FORMATS)
def test_tool_calls_are_read_or_stay_text_and_can_be_sent_on(kind: type[tools.Tagged]) -> None:
    for text in TEXTS:
        rest, calls = kind().read(text, [TOOL])
        assert isinstance(rest, str)
        for name, arguments in calls:
            json.dumps(tools.value(arguments))
            kind().write(name, arguments)
            tools.canonical(arguments)
        assert 0 <= kind().call_start(text) <= len(text)


@pytest.mark.parametrize("kind", FORMATS)
def test_random_cuts_of_calls_are_read_too(kind: type[tools.Tagged]) -> None:
    rng, pieces = random.Random(4), [kind().write("f", '{"x": [1, {"y": "z"}]}'), "{", "[", "]", "}", '"', "a", " "]
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 9)))
        kind().read(text[rng.randrange(10) : len(text) - rng.randrange(10)], [TOOL])


def test_a_call_that_is_nested_too_deeply_stays_text() -> None:
    text = "<tool_call>" + "[" * 1100 + "</tool_call>"
    assert tools.Tagged().read(text) == (text, [])


@pytest.mark.parametrize(
    "parse", [parse_json, lambda text: parse_json_at(text, 0), mcp.parse, parse_command, tools.value, tools.canonical]
)
def test_parsers_of_answers_return(parse: Callable[[str], Any]) -> None:
    for text in TEXTS:
        parse(text)


@pytest.mark.parametrize("make", [FrozenLake, GuessNumber, ColumnSum, Addition])
def test_shipped_environments_take_any_action(make: Callable[[], Any]) -> None:
    environment = make()
    for number, text in enumerate(TEXTS):
        environment.reset(number)
        environment.step(text)


def test_shipped_rewards_score_any_action() -> None:
    info = {"expression": "347+285", "answer": "632", "success": True}
    for text in TEXTS:
        episode = Episode("e", "t", 0, (EpisodeTurn((Message("user", "x"),), text, 0.0),), info=info)
        for reward in (functions.env_return, functions.column_sum):
            assert 0.0 <= reward(episode).value <= 1.0
