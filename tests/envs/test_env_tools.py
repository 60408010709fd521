"""Tools that an environment declares: described, called, and what happens when a call does not fit."""

import json
import random
from typing import Any, Literal

import pytest

from rollart.core.action import Tool
from rollart.core.types import Message
from rollart.envs.price_list import ITEMS, PriceList, player
from rollart.envs.process_entry import EnvironmentProcess
from rollart.envs.replies import parse_observation, parse_step
from rollart.envs.tools import Toolbox, call_text, calls_in, describe, plain_tool
from rollart.models.chat import CANONICAL, declared_tools

PRICES = "rollart.envs.price_list:PriceList"


def search(query: str, limit: int = 3, kind: Literal["web", "news"] = "web", tags: list[str] | None = None) -> str:
    """Search
    the index.

    Args:
        query: what to look for
        limit (int): at most as many

    Returns:
        limit: not an argument
    """
    return f"{query} {limit} {kind}"


class Desk:
    """Ends an episode from a tool, and has one that is only a schema."""

    def __init__(self) -> None:
        self.tools = [search, self.finish, self.broken, {"name": "note", "inputSchema": {"type": "object"}}]
        self.notes: list[dict[str, Any]] = []

    def finish(self, answer: float) -> tuple[str, float, bool]:
        return "thank you", answer, True

    def broken(self) -> str:
        raise OSError("no disk")

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.notes.append(arguments)
        return {name: len(self.notes)}


@pytest.fixture
def toolbox() -> Toolbox:
    desk = Desk()
    return Toolbox(desk, desk.tools)


def test_a_function_is_described_by_its_hints_and_its_docstring() -> None:
    assert describe(search) == {
        "name": "search",
        "description": "Search the index.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what to look for"},
                "limit": {"type": "integer", "description": "at most as many"},
                "kind": {"type": "string", "enum": ["web", "news"]},
                "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            },
            "required": ["query"],
        },
    }
    with pytest.raises(TypeError, match="the arguments of a tool have names"):
        describe(lambda *words: "")


def test_openais_and_mcps_forms_of_a_tool_are_known() -> None:
    plain = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert plain_tool({"type": "function", "function": plain}) == plain == plain_tool(plain)
    assert plain_tool({"name": "f", "description": "d", "inputSchema": {"type": "object"}}) == plain


def test_calls_are_dispatched_in_order_until_one_ends_the_episode(toolbox: Toolbox) -> None:
    step = toolbox.run([("search", {"query": "a", "kind": "news"}), ("note", {"x": 1}), ("note", {})])
    assert [message["content"] for message in step["messages"]] == ["a 3 news", '{"note": 1}', '{"note": 2}']
    assert (step["reward"], step["done"], step["info"]) == (None, False, {"tool_calls": 3, "tool_mistakes": 0})
    last = toolbox.run([("finish", {"answer": 2}), ("finish", {"answer": 3})])
    assert (last["reward"], last["done"], len(last["messages"])) == (2, True, 1)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("steal", {}, "there is no tool 'steal'"),
        ("search", "a", "not an object"),
        ("search", {}, "search needs 'query'"),
        ("search", {"query": "a", "page": 2}, "search takes no 'page'"),
        ("search", {"query": 3}, "'query' is of type string, not 3"),
        ("search", {"query": "a", "limit": True}, "'limit' is of type integer"),
        ("search", {"query": "a", "kind": "films"}, "'kind' is one of web, news"),
    ],
)
def test_a_call_that_does_not_fit_is_the_policys_mistake(toolbox: Toolbox, name: str, arguments: Any, why: str) -> None:
    step = toolbox.run([(name, arguments)])
    assert why in step["messages"][0]["content"] and not step["done"]
    assert step["info"] == {"tool_calls": 1, "tool_mistakes": 1}


def test_a_tool_that_fails_is_a_failure_of_the_environment(toolbox: Toolbox) -> None:
    with pytest.raises(OSError, match="no disk"):
        toolbox.run([("broken", {})])


def test_what_is_written_for_environments_is_what_renderers_write() -> None:
    arguments = {"item": "a \u00e9 </b>", "n": 1}
    written = call_text("f", arguments)
    assert written == CANONICAL.write("f", json.dumps(arguments))
    assert calls_in(f"Well.\n{written}\n{written}") == ("Well.", [("f", arguments)] * 2)
    for broken in ("<tool_call>{", '<tool_call>{"name": 3}</tool_call>', "{}"):
        assert calls_in(broken) == (broken, [])


def test_an_episode_with_tools_in_a_process() -> None:
    process = EnvironmentProcess()
    first = parse_observation(process.reset(PRICES, {}, False, 3))
    assert declared_tools(first) == (Tool(**describe(PriceList().price)),)
    item = next(item for item in ITEMS if item in first[1].content)
    found = parse_step(process.step(call_text("price", {"item": item})))
    assert not found.done and found.messages[0].role == "tool"
    assert parse_step(process.step(found.messages[0].content)).reward == 1.0
    assert parse_observation(process.reset(PRICES, {}, False, 4)) != first
    assert parse_step(process.step(call_text("price", {"item": "gold"}))).messages == (
        Message("tool", "Error: there is no gold"),
    )
    assert parse_step(process.step("42000")).reward == 0.0


def test_the_scripted_player_calls_the_tool() -> None:
    demonstrate = EnvironmentProcess().demonstrate
    name = "rollart.envs.price_list:player"
    for seed in range(5):
        first, played = demonstrate(env=PRICES, args={}, player=name, player_args={"skill": 1.0}, seed=seed, turns=3)
        assert first[0]["role"] == "tools"
        assert len(played) == 2 and played[-1][1]["reward"] == 1.0
    env = PriceList()
    env.reset(0)
    assert "price" in player(env, random.Random(0))
