"""Requests and responses of the gateway, whichever API they came by. Nothing here knows HTTP or a model."""

from typing import Literal

from msgspec import Struct

from rollart.core.action import Tool, ToolCall


class ChatMessage(Struct, frozen=True):
    """One message. `call_id` names the call that a tool's message is the result of."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


class CompletionRequest(Struct, kw_only=True):
    """The context is `messages`, or `text` as it stands, or `tokens`.

    `force`: the model must call this tool, or any if it is empty. `parse_calls`: tool calls are parsed from the text.
    `prefix` is how the response has to begin.
    """

    model: str = ""
    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    tokens: list[int] | None = None
    tools: tuple[Tool, ...] = ()
    force: str | None = None
    parse_calls: bool = True
    prefix: str = ""
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    usage_in_stream: bool = False


class CompletionChoice(Struct):
    """One completion. `stopped_by` is the client's stop string that ended it, if one did; `reasoning` is what the model
    thought before its answer."""

    text: str
    calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length"]
    stopped_by: str | None
    tokens: list[int]
    logprobs: list[float]
    reasoning: str = ""


class CompletionResponse(Struct):
    """`cached` of the `prompt` tokens needed no prefill, for the first choice. Until generation ends there are no
    choices and `cached` is 0; `reasoning` has that of choices whose answer has begun."""

    id: str
    created: int
    model: str
    prompt: list[int]
    choices: list[CompletionChoice] = []
    cached: int = 0
    reasoning: dict[int, str] = {}

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)
