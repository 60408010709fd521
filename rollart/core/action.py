"""What the policy may call and what it wrote, in every format the same. Records without behaviour.

A conversation declares its tools in a first message of the role `tools`: a JSON list of `{"name", "description",
"parameters"}`. An action is text; each call in it is written as
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, whatever the format of the model, so environments, rewards,
players and views read one format.
"""

from typing import Any

from msgspec import Struct

TOOLS_ROLE = "tools"


class Tool(Struct, frozen=True):
    """`parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolCall(Struct, frozen=True):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str
    id: str = ""


class ParsedAction(Struct, frozen=True):
    """`text` is the answer and its calls; `reasoning` is what the model thought before."""

    text: str
    reasoning: str = ""
