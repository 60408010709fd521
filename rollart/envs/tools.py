"""Tools of an environment: typed Python functions or JSON schemas, which the policy calls in its own format.

An environment declares them in `tools`, a list. The chat template shows them to the model; calls arrive here in one
format (`core/action.py`) and are dispatched: to the function itself, or to the environment's `call(name, arguments)`
for those that are schemas. An action without a call goes to `step`, as ever.

What a tool returns is the result that the policy reads, or, if it is a tuple `(observation, reward, done)`, a step. A
call that does not fit, or a tool that raises ValueError, LookupError or ArithmeticError, is the policy's mistake, and
the result says so; any other exception is the environment's failure.

Standard library only, Python 3.9 or later.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from rollart.core.foreign import parse_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
POLICY_ERRORS = (ValueError, LookupError, ArithmeticError)
NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}
KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
}
Declared = typing.Union[Callable[..., Any], dict[str, Any]]  # noqa: UP007  # evaluated, by Python 3.9 too


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A call as scripted players write it."""
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def calls_in(action: str) -> tuple[str, list[tuple[str, Any]]]:
    """The text without the calls, and each call's name and arguments. What cannot be parsed stays text."""
    first, *tagged = action.split(OPEN)
    rest, calls = [first], []
    for part in tagged:
        inside, _, after = part.partition(CLOSE)
        call = parse_json(inside.strip())
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            calls.append((call["name"], call.get("arguments", {})))
            rest.append(after)
        else:
            rest.append(OPEN + part)
    return "".join(rest).strip() if calls else action, calls


class Toolbox:
    """The tools of one environment. Counts the calls of an episode, and those that were mistakes."""

    def __init__(self, environment: Any, tools: Sequence[Declared]) -> None:
        self._environment = environment
        self._functions = {each.__name__: each for each in tools if not isinstance(each, dict)}
        described = [each if isinstance(each, dict) else describe(each) for each in tools]
        self.tools = {tool["name"]: tool for tool in map(plain_tool, described)}
        self.calls = self.mistakes = 0

    def opening(self, observation: Any) -> list[Any]:
        """The first messages, with the tools before them."""
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        return [{"role": "tools", "content": json.dumps(list(self.tools.values()), ensure_ascii=False)}, *messages]

    def run(self, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """The step of an action with calls: made in order, until one ends the episode."""
        messages: list[Any] = []
        reward: float | None = None
        done = False
        for name, arguments in calls:
            result = self._call(name, arguments)
            if isinstance(result, tuple) and len(result) == 3:
                result, more, done = result
                reward = (reward or 0.0) + more if more is not None else reward
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            messages.append({"role": "tool", "content": text})
            if done:
                break
        info = {"tool_calls": self.calls, "tool_mistakes": self.mistakes}
        return {"messages": messages, "reward": reward, "done": bool(done), "info": info}

    def _call(self, name: str, arguments: Any) -> Any:
        self.calls += 1
        try:
            self._check(name, arguments)
            if name in self._functions:
                return self._functions[name](**arguments)
            return self._environment.call(name, arguments)
        except POLICY_ERRORS as error:
            self.mistakes += 1
            return f"Error: {error}"

    def _check(self, name: str, arguments: Any) -> None:
        """Raises ValueError if the call does not fit the tool's schema."""
        if name not in self.tools:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(self.tools)}")
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are not an object")
        schema = self.tools[name]["parameters"]
        known = schema.get("properties", {})
        missing = [key for key in schema.get("required", ()) if key not in arguments]
        unknown = [key for key in arguments if known and key not in known]
        if missing or unknown:
            what = f"needs {missing[0]!r}" if missing else f"takes no {unknown[0]!r}"
            raise ValueError(f"{name} {what}")
        for key, value in arguments.items():
            about = known.get(key, {})
            if "enum" in about and value not in about["enum"]:
                raise ValueError(f"{key!r} is one of {', '.join(map(str, about['enum']))}, not {value!r}")
            kind = about.get("type")
            if isinstance(kind, str) and not _is(value, kind):
                raise ValueError(f"{key!r} is of type {kind}, not {value!r}")


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """Name, description and JSON schema of a function, from its type hints and its docstring. Lines `name: text` under
    `Args:` describe the arguments."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):  # a hint that this Python cannot evaluate
        hints = {}
    about, notes = _docstring(inspect.getdoc(function) or "")
    properties: dict[str, Any] = {}
    required = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"the tool {function.__name__} takes {parameter}; the arguments of a tool have names")
        properties[name] = _schema(hints.get(name)) | ({"description": notes[name]} if name in notes else {})
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": function.__name__, "description": about, "parameters": parameters}


def _schema(hint: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"type": NAMES.get(type(inner[0]), "string"), "enum": list(inner)}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"type": "string", "enum": [member.value for member in hint]}
    if origin is typing.Union or origin is getattr(types, "UnionType", typing.Union):
        return {"anyOf": [{"type": "null"} if each is type(None) else _schema(each) for each in inner]}
    if origin is list and inner:
        return {"type": "array", "items": _schema(inner[0])}
    kind = NAMES.get(origin or hint)
    return {"type": kind} if kind else {}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What it says, and what it says of each argument."""
    about, _, listed = text.partition("Args:")
    notes: dict[str, str] = {}
    for line in listed.splitlines():
        name, colon, note = line.strip().partition(":")
        if line.strip() and not line.startswith((" ", "\t")):
            break  # another section
        if colon and name.split(" ")[0].isidentifier():
            notes[name.split(" ")[0]] = note.strip()
    return " ".join(about.split()), notes


def plain_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's form has the tool in `function`, MCP's the schema in `inputSchema`."""
    tool = tool.get("function", tool)
    schema = tool.get("parameters", tool.get("inputSchema", tool.get("input_schema", {})))
    return {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, KINDS.get(kind, (object,)))
