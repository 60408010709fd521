"""Formats in which models write tool calls: writing and parsing.

| | written as | by |
|---|---|---|
| Tagged | `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` | Qwen, Hermes, SmolLM |
| Bare | an object with `parameters`, and nothing else | Llama 3 |
| Listed | `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` | Mistral until 2024 |
| Named | `[TOOL_CALLS]name[ARGS]{...}` | Mistral since |
| Marked | `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` | Qwen3-Coder, Qwen3.5 |
| Keyed | `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` | GLM since 4.5 |
| Separated | `name<sep>{...}` between control tokens | DeepSeek since 3.1 |
| Fenced | `function<sep>name` and the arguments in a fence of json, between control tokens | DeepSeek V3 and R1 |

What cannot be parsed as a call stays text. `Tagged` is also the format of actions outside of models (`core/action.py`).
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from rollart.core.action import Tool
from rollart.core.foreign import parse_json, parse_json_at

NamedCalls = list[tuple[str, str]]
_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[{]+)\s*(?:\[CALL_ID\][^\[]*)?\[ARGS\]\s*(?=\{)")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
# Control tokens of DeepSeek, with its wide bars and low lines.
CALLS_BEGIN, CALLS_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN, CALL_END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
CALL_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"


class Tagged:
    """The default, which the other formats override. `marks` are kept when tokens are decoded, though the model may
    have control tokens for them; a call begins with `start`."""

    marks: tuple[str, ...] = ()
    start, key, opening, closing = "<tool_call>", "arguments", "<tool_call>\n", "\n</tool_call>"

    def write(self, name: str, arguments: str) -> str:
        """A call as the model would have written it."""
        call = f'{{"name": {_json(name)}, "{self.key}": {_json(value(arguments))}}}'
        return f"{self.opening}{call}{self.closing}"

    def write_all(self, calls: NamedCalls) -> str:
        """Several calls of one action."""
        return "\n".join(self.write(name, arguments) for name, arguments in calls)

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
        return _typed_call(match[1].strip(), _PARAMETER.findall(_closed(match[2], "</parameter>")), tools)


class Keyed(Tagged):
    def write(self, name: str, arguments: str) -> str:
        parsed = value(arguments)
        pairs = parsed.items() if isinstance(parsed, dict) else ()
        inside = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{_plain(each)}</arg_value>\n" for key, each in pairs)
        return f"<tool_call>{name}\n{inside}</tool_call>"

    def begin(self, name: str) -> str:
        return f"<tool_call>{name}\n" if name else "<tool_call>"

    def _call(self, inside: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
        name, key, rest = inside.partition("<arg_key>")
        name = name.strip()
        if not name or any(letter.isspace() or letter in "<>{}" for letter in name):
            return None
        return _typed_call(name, _ARGUMENT.findall(_closed(key + rest, "</arg_value>")), tools)


class Separated(Tagged):
    marks = (CALLS_BEGIN, CALL_BEGIN, CALL_SEPARATOR, CALL_END, CALLS_END)
    start = CALLS_BEGIN

    def write(self, name: str, arguments: str) -> str:
        return self.write_all([(name, arguments)])

    def write_all(self, calls: NamedCalls) -> str:
        written = (f"{CALL_BEGIN}{self._inside(name, _json(value(given)))}{CALL_END}" for name, given in calls)
        return f"{CALLS_BEGIN}{self._between.join(written)}{CALLS_END}"

    def begin(self, name: str) -> str:
        return f"{CALLS_BEGIN}{CALL_BEGIN}" + (self._inside(name, "").removesuffix("\n```") if name else "")

    def read(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, NamedCalls]:
        before, mark, after = text.partition(CALLS_BEGIN)
        parts = after.partition(CALLS_END)[0].split(CALL_BEGIN)[1:] if mark else []
        calls = [self._call(part.partition(CALL_END)[0], tools) for part in parts]
        whole = [call for call in calls if call is not None]
        return (before.rstrip(), whole) if whole and len(whole) == len(calls) else (text, [])

    _between = ""

    def _inside(self, name: str, arguments: str) -> str:
        return f"{name}{CALL_SEPARATOR}{arguments}"

    def _call(self, inside: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
        name, separator, arguments = inside.partition(CALL_SEPARATOR)
        parsed = parse_json(arguments.strip()) if separator else None
        return (name.strip(), _json(parsed)) if name.strip() and isinstance(parsed, dict) else None


class Fenced(Separated):
    _between = "\n"

    def _inside(self, name: str, arguments: str) -> str:
        return f"function{CALL_SEPARATOR}{name}\n```json\n{arguments}\n```"

    def _call(self, inside: str, tools: Sequence[Tool]) -> tuple[str, str] | None:
        name, _, rest = inside.partition(CALL_SEPARATOR)[2].partition("\n")
        arguments = rest.strip().removeprefix("```json").removesuffix("```")
        return super()._call(f"{name}{CALL_SEPARATOR}{arguments}", tools)


def format_of(template: str) -> Tagged:
    """The format that a chat template mentions; Tagged if it mentions none."""
    if CALL_BEGIN in template:
        return Fenced() if "```json" in template else Separated()
    if "<arg_key>" in template:
        return Keyed()
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


def _typed_call(name: str, found: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> tuple[str, str]:
    """A call whose arguments were written as text: the schema of the tool says what they are."""
    known = next((tool.parameters.get("properties") for tool in tools if tool.name == name), None)
    kinds = known if isinstance(known, dict) else {}
    return name, _json({key.strip(): _typed(text, kinds.get(key.strip())) for key, text in found})


def _closed(text: str, end: str) -> str:
    """Up to the last argument that ends: looking for the end of each of the others would take quadratic time."""
    return text[: text.rfind(end) + len(end)] if end in text else ""


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `word`."""
    for length in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:length]):
            return length
    return 0


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
