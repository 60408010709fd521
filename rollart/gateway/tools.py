"""Formats in which models write tool calls: writing and parsing.

| | written as | by |
|---|---|---|
| Tagged | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Qwen, Hermes, SmolLM |
| Bare | an object with `parameters`, and nothing else | Llama 3 |
| Listed | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` | Mistral until 2024 |
| Named | `[TOOL_CALLS]name[ARGS]{...}` | Mistral since |
| Marked | `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` | Qwen3-Coder, Qwen3.5 |

What cannot be parsed as a call stays text.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from rollart.core.foreign import parse_json, parse_json_at
from rollart.gateway.detokenizer import overlap
from rollart.gateway.messages import Tool

NamedCalls = list[tuple[str, str]]
_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{)")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class Tagged:
    """The default, which the other formats override. `marks` are kept when tokens are decoded, though the model may
    have control tokens for them; a call begins with `start`."""

    marks: tuple[str, ...] = ()
    start, key, opening, closing = "<tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>"

    def write(self, name: str, arguments: str) -> str:
        """A call as the model would have written it."""
        call = f'{{"name": {_json(name)}, "{self.key}": {_json(value(arguments))}}}'
        return f"{self.opening}{call}{self.closing}"

    def begin(self, name: str) -> str:
        """How a call of this tool, or of any if it is empty, begins."""
        if not name:
            return f'{self.opening}{{"name": "'
        return f'{self.opening}{{"name": {_json(name)}, "{self.key}": '

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, NamedCalls]:
        """The text without the calls, and each call's name and arguments. The text before a call is unchanged."""
        calls: NamedCalls = []
        first, *tagged = text.split("<tool_call>")
        rest = [first]
        for part in tagged:
            inside, _, after = part.partition("</tool_call>")
            call = self._call(inside.strip(), tools)
            if call is None:
                rest.append(f"<tool_call>{part}")
                continue
            calls.append(call)
            rest.append(after)
        whole = "".join(rest)
        return (whole.rstrip() if calls else whole), calls

    def _call(self, inside: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
        return _call(parse_json(inside), self.key)

    def call_start(self, text: str) -> int:
        """From where on this incomplete text may belong to a call."""
        at = text.find(self.start)
        return at if at >= 0 else len(text) - overlap(text, self.start)

    def explain(self, tools: Sequence[Tool]) -> str:
        """Instructions for a model whose template does not support tools."""
        listed = "\n".join(_json(described(tool)) for tool in tools)
        known = tools[0].parameters.get("properties")
        example = self.write(tools[0].name, _json(dict.fromkeys(known, "...") if isinstance(known, dict) else {}))
        return f"You can call these tools:\n{listed}\n\nTo call one, write for instance:\n{example}"


class Bare(Tagged):
    key, opening, closing = "parameters", "", ""

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, NamedCalls]:
        call = _call(parse_json(text.strip()), self.key)
        return ("", [call]) if call is not None else (text, [])

    def call_start(self, text: str) -> int:
        return 0 if text.lstrip()[:1] in ("", "{") else len(text)


class Listed(Tagged):
    marks: tuple[str, ...] = ("[TOOL_CALLS]",)
    start, opening, closing = "[TOOL_CALLS]", "[TOOL_CALLS][", "]"

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, NamedCalls]:
        before, mark, after = text.partition(self.start)
        parsed = parse_json(after.strip()) if mark else None
        calls = [_call(each, self.key) for each in parsed] if isinstance(parsed, list) else []
        whole = [call for call in calls if call is not None]
        return (before.rstrip(), whole) if whole and len(whole) == len(calls) else (text, [])


class Named(Listed):
    marks = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def write(self, name: str, arguments: str) -> str:
        return f"[TOOL_CALLS]{name}[ARGS]{_json(value(arguments))}"

    def begin(self, name: str) -> str:
        return f"[TOOL_CALLS]{name}[ARGS]" if name else "[TOOL_CALLS]"

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, NamedCalls]:
        calls: NamedCalls = []
        rest, at = "", 0
        while (match := _NAMED.search(text, at)) is not None:
            parsed, end = parse_json_at(text, match.end())
            if parsed is None:
                break
            calls.append((match[1], _json(parsed)))
            rest, at = rest + text[at : match.start()], end
        return ((rest + text[at:]).rstrip(), calls) if calls else (text, [])


class Marked(Tagged):
    def write(self, name: str, arguments: str) -> str:
        parsed = value(arguments)
        pairs = parsed.items() if isinstance(parsed, dict) else ()
        inside = "".join(f"<parameter={key}>\n{_plain(each)}\n</parameter>\n" for key, each in pairs)
        return f"{self.opening}<function={name}>\n{inside}</function>{self.closing}"

    def begin(self, name: str) -> str:
        return f"{self.opening}<function={name}>\n" if name else f"{self.opening}<function="

    def _call(self, inside: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
        match = _FUNCTION.match(inside)
        if match is None:
            return None
        name = match[1].strip()
        known = next((tool.parameters.get("properties") for tool in tools if tool.name == name), None)
        kinds = known if isinstance(known, dict) else {}
        found = _PARAMETER.findall(_closed(match[2]))
        arguments = {key.strip(): _typed(text, kinds.get(key.strip())) for key, text in found}
        return name, _json(arguments)


def format_of(template: str) -> Tagged:
    """The format that a chat template mentions; Tagged if it mentions none."""
    if "[TOOL_CALLS]" in template:
        return Named() if "[ARGS]" in template else Listed()
    if "<function=" in template and "<parameter=" in template:
        return Marked()
    bare = "<|python_tag|>" in template or ('"parameters": ' in template and "<tool_call>" not in template)
    return Bare() if bare else Tagged()


def described(tool: Tool) -> dict[str, Any]:
    """As chat templates expect it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def canonical(arguments: str) -> str:
    """Equal for arguments that differ in spaces and order only."""
    parsed = parse_json(arguments)
    return arguments if parsed is None else json.dumps(parsed, sort_keys=True)


def value(arguments: str) -> Any:
    """The parsed JSON; text that is not JSON is returned as it is."""
    parsed = parse_json(arguments or "{}")
    return arguments if parsed is None and arguments.strip() != "null" else parsed


def _call(parsed: Any, key: str) -> tuple[str, str] | None:
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    arguments = parsed.get(key, parsed.get("arguments", parsed.get("parameters", {})))
    if isinstance(arguments, str):
        return parsed["name"], arguments
    return (parsed["name"], _json(arguments)) if isinstance(arguments, dict) else None


def _typed(text: str, schema: Any) -> Any:
    """Text if the schema says string; otherwise parsed as JSON, if it is JSON."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    parsed = parse_json(text)
    return text if parsed is None and text.strip() != "null" else parsed


def _closed(text: str) -> str:
    """Up to the last parameter that ends: looking for the end of each of the others would take quadratic time."""
    return text[: text.rfind("</parameter>") + len("</parameter>")]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
