"""What OpenAI's APIs have in common: errors, tools, usage, logprobs."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollart.gateway.apis.base import Part, text_of, texts
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import (
    ChatMessage,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Tool,
    ToolCall,
)
from rollart.gateway.template import ChatTemplate
from rollart.gateway.tenant import Tenant

Count = Annotated[int, Meta(ge=1)]
Several = Annotated[int, Meta(ge=1, le=128)]
Seed = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Heat = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(gt=0, le=1)]
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class StreamOptions(Struct):
    include_usage: bool = False


class Drawn(Struct, kw_only=True):
    """What every request may say of how its answers are drawn."""

    max_tokens: Count | None = None
    temperature: Heat | None = None
    top_p: Share | None = None
    top_k: int | None = None
    n: Several | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None

    def drawing(self) -> dict[str, Any]:
        """The same for an `Ask`."""
        keys = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        return {key: getattr(self, key) for key in keys} | {"n": self.n or 1, "stop": texts(self.stop)}


class Streamed(Drawn, kw_only=True):
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def streaming(self) -> dict[str, Any]:
        options = self.stream_options
        return {"stream": bool(self.stream), "usage_in_stream": options is not None and options.include_usage}


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Call(Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageCall(Struct):
    function: Call
    id: str | None = None


class Message(Struct):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None

    def said(self, number: int) -> ChatMessage:
        calls = tuple(
            ToolCall(call.function.name, arguments(call.function.arguments), call.id or "")
            for call in self.tool_calls or ()
        )
        text = text_of(self.content, f"messages[{number}].content")
        return ChatMessage(self.role, text, calls, self.tool_call_id or "")


class OpenAI:
    """`template` names tokens."""

    speaks = True

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def error(self, error: ApiError) -> Any:
        kind = _KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}

    def served(self, ask: CompletionRequest, answer: CompletionResponse, tenant: Tenant) -> None:
        """Nothing to remember: clients repeat the conversation."""

    def piece(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._template.piece(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}

    def logprobs(self, choice: CompletionChoice) -> dict[str, Any]:
        pairs = zip(choice.tokens, choice.logprobs, strict=True)
        return {"content": [self.piece(token, logprob) for token, logprob in pairs], "refusal": None}


def arguments(given: str | dict[str, Any]) -> str:
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def tool(function: Function) -> Tool:
    return Tool(function.name, function.description or "", function.parameters or {})


def wanted(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> tuple[str | None, bool]:
    """`force` and `calls` of an ask, from a `tool_choice`."""
    if choice in (None, "auto"):
        return None, True
    if choice == "none":
        return None, False
    if choice == "required":
        name = ""
    elif isinstance(choice, dict):
        inner = choice.get("function", choice)
        name = inner.get("name", "") if isinstance(inner, dict) else ""
    else:
        raise invalid(f"tool_choice is none, auto, required or a function, not {choice!r}", "tool_choice")
    if not tools or (name and name not in [each.name for each in tools]):
        raise invalid(f"tool_choice asks for {name or 'a tool'}, which is not among the tools", "tool_choice")
    return name, True


def finish_reason(choice: CompletionChoice) -> str:
    return "tool_calls" if choice.calls else choice.finish


def usage(answer: CompletionResponse) -> dict[str, Any]:
    prompt = len(answer.prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer.made,
        "total_tokens": prompt + answer.made,
        "prompt_tokens_details": {"cached_tokens": answer.cached},
    }
