"""How a model writes the call of a tool, and how it is read back.

Most open models write `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen, Hermes, SmolLM). Llama 3 writes
a bare object with `parameters`. What cannot be read as a call stays text: the model said it, and the agent may see it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from rollart.gateway.words import Tool

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


class ToolFormat(Protocol):
    def write(self, name: str, arguments: str) -> str:
        """A call as the model would have written it."""
        ...

    def begin(self, name: str) -> str:
        """How a call of this tool, or of any if it is empty, begins."""
        ...

    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """The text beside the calls, and each call's name and arguments."""
        ...

    def explain(self, tools: Sequence[Tool]) -> str:
        """What to tell a model whose template knows no tools."""
        ...


class Tagged:
    key, opening, closing = "arguments", "<tool_call>\n", "\n</tool_call>"

    def write(self, name: str, arguments: str) -> str:
        call = f'{{"name": {_json(name)}, "{self.key}": {_json(value(arguments))}}}'
        return f"{self.opening}{call}{self.closing}"

    def begin(self, name: str) -> str:
        if not name:
            return f'{self.opening}{{"name": "'
        return f'{self.opening}{{"name": {_json(name)}, "{self.key}": '

    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        calls: list[tuple[str, str]] = []

        def taken(match: re.Match[str]) -> str:
            call = _call(match[1], self.key)
            if call is None:
                return match[0]
            calls.append(call)
            return ""

        rest = _TAGGED.sub(taken, text)
        return (rest.strip() if calls else rest), calls

    def explain(self, tools: Sequence[Tool]) -> str:
        listed = "\n".join(_json(described(tool)) for tool in tools)
        known = tools[0].parameters.get("properties")
        example = self.write(tools[0].name, _json(dict.fromkeys(known, "...") if isinstance(known, dict) else {}))
        return f"You can call these tools:\n{listed}\n\nTo call one, write for instance:\n{example}"


class Bare(Tagged):
    """One object and nothing else."""

    key, opening, closing = "parameters", "", ""

    def read(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        call = _call(text.strip(), self.key)
        return ("", [call]) if call is not None else (text, [])


def format_of(template: str) -> ToolFormat:
    """The one that a chat template speaks of; the tagged one if it speaks of none."""
    bare = "<|python_tag|>" in template or ('"parameters": ' in template and "<tool_call>" not in template)
    return Bare() if bare else Tagged()


def described(tool: Tool) -> dict[str, Any]:
    """As chat templates want it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def canonical(arguments: str) -> str:
    """The same for arguments that differ in spaces and order only."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


def _call(text: str, key: str) -> tuple[str, str] | None:
    try:
        said = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get(key, said.get("arguments", said.get("parameters", {})))
    if isinstance(arguments, str):
        return said["name"], arguments
    return (said["name"], _json(arguments)) if isinstance(arguments, dict) else None


def value(arguments: str) -> Any:
    """What the JSON says; what is none stays text."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
