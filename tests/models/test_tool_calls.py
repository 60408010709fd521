"""Calls of tools, written and read back."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rollart.core.action import Tool
from rollart.models.tool_calls import (
    CALL_BEGIN,
    Bare,
    Fenced,
    Keyed,
    Listed,
    Marked,
    Named,
    Separated,
    Tagged,
    canonical,
    format_of,
)

NAMES = st.text("abc_1", min_size=1, max_size=8)
FORMATS: tuple[Tagged, ...] = (Tagged(), Bare(), Listed(), Named(), Marked(), Keyed(), Separated(), Fenced())
VALUES = st.dictionaries(NAMES, st.integers() | st.text(max_size=20) | st.lists(st.booleans(), max_size=3), max_size=4)


@given(name=NAMES, arguments=VALUES)
def test_what_a_format_writes_it_reads_back(name: str, arguments: dict[str, object]) -> None:
    strings = {key: {"type": "string"} for key, given in arguments.items() if isinstance(given, str)}
    tools = [Tool(name, "", {"properties": strings})]
    for form in FORMATS:
        text, calls = form.read(form.write(name, json.dumps(arguments)), tools)
        if not any(mark in json.dumps(arguments) for mark in ("</", "<", "[TOOL")):
            assert (text, [(called, json.loads(given)) for called, given in calls]) == ("", [(name, arguments)])


@given(name=NAMES, arguments=VALUES)
def test_what_begins_a_call_is_how_a_call_begins(name: str, arguments: dict[str, object]) -> None:
    for form in FORMATS:
        written = form.write(name, json.dumps(arguments))
        assert written.startswith(form.begin(name))
        assert written.startswith(form.begin(""))


def test_text_around_calls_stays_and_an_invalid_call_is_text() -> None:
    said = 'A.<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call> B.'
    assert Tagged().read(said) == ("A.\n B.", [("f", "{}"), ("g", "{}")])
    for broken in (
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>[1]</tool_call>",
        "{}",
    ):
        assert Tagged().read(broken) == (broken, [])


def test_mistral_writes_a_list_or_a_name_before_its_arguments() -> None:
    said = 'Well. [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    assert Listed().read(said) == ("Well.", [("f", '{"a": 1}'), ("g", "{}")])
    assert Named().read('[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]g[CALL_ID]x9[ARGS]{}') == (
        "",
        [("f", '{"a": {"b": "}"}}'), ("g", "{}")],
    )
    for broken in ("[TOOL_CALLS]", "[TOOL_CALLS][1]", "[TOOL_CALLS]f[ARGS]{", "[TOOL_CALLS]f"):
        assert Listed().read(broken) == Named().read(broken) == (broken, [])


def test_a_marked_parameter_is_what_its_schema_says() -> None:
    said = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\n12\n</parameter>\n"
    said += "<parameter=c>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>"
    tools = [Tool("f", "", {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}})]
    ((name, given),) = Marked().read(said, tools)[1]
    assert (name, json.loads(given)) == ("f", {"a": "12", "b": 12, "c": "two\nlines"})


def test_a_call_cut_off_before_its_end_tag_counts_if_it_is_whole() -> None:
    assert Tagged().read('<tool_call>{"name": "f", "arguments": {"a": 1}}') == ("", [("f", '{"a": 1}')])


def test_the_template_decides_the_format() -> None:
    assert isinstance(format_of("... <|python_tag|> ..."), Bare)
    assert isinstance(format_of("... [TOOL_CALLS] ... [ARGS] ..."), Named)
    assert type(format_of("... [TOOL_CALLS] ...")) is Listed
    assert isinstance(format_of("<tool_call><function=...><parameter=...>"), Marked)
    assert isinstance(format_of("<tool_call>{name}\n<arg_key>{key}</arg_key>"), Keyed)
    assert type(format_of(f"... {CALL_BEGIN} ...")) is Separated
    assert isinstance(format_of(f"... {CALL_BEGIN} ... ```json"), Fenced)
    assert isinstance(format_of("... <tool_call> ..."), Tagged) and not isinstance(format_of("plain"), Bare)


def test_arguments_that_differ_in_spaces_and_order_are_the_same() -> None:
    assert canonical('{"a": 1, "b": [2]}') == canonical('{"b":[2],"a":1}') != canonical('{"a": 2, "b": [2]}')
