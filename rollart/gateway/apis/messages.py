"""Anthropic messages: POST /v1/messages."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.json import Decoder

from rollart.core.action import Tool, ToolCall
from rollart.gateway.apis.base import Api, ContentPart, ResponseFormat, check_format, decode_body, event, text_of
from rollart.gateway.apis.openai import Probability, TokenCount, arguments, parse_tool_choice
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import ChatMessage, CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession
from rollart.models.tool_calls import value

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_IGNORED = ("thinking", "redacted_thinking")


class _Block(Struct):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentPart] | None = None


class _Message(Struct):
    role: str
    content: str | list[_Block]


class _Tool(Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _ToolChoice(Struct):
    type: str
    name: str | None = None


class _Output(Struct):
    format: ResponseFormat | None = None


class _Request(Struct):
    messages: list[_Message]
    max_tokens: TokenCount
    model: str = ""
    system: str | list[ContentPart] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _Output | None = None


class _CountRequest(_Request):
    max_tokens: TokenCount = 1


class Messages(Api):
    _decoder: "Decoder[Any]" = Decoder(_Request)

    def parse(self, body: bytes, session: EpisodeSession) -> CompletionRequest:
        request = decode_body(self._decoder, body)
        if not request.messages:
            raise invalid("there must be at least one message", "messages")
        check_format(request.output_config.format if request.output_config else None, "output_config.format")
        messages = [each for number, message in enumerate(request.messages) for each in _chat_messages(message, number)]
        if system := text_of(request.system, "system"):
            messages.insert(0, ChatMessage("system", system))
        prefix = ""
        if messages[-1].role == "assistant" and not messages[-1].calls:
            prefix = messages.pop().text  # the model continues this text
        tools = tuple(Tool(tool.name, tool.description or "", tool.input_schema or {}) for tool in request.tools or ())
        force, parse_calls = _tool_choice(request.tool_choice, tools)
        return CompletionRequest(
            model=request.model,
            messages=tuple(messages),
            tools=tools,
            force=force,
            parse_calls=parse_calls,
            prefix=prefix,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=tuple(request.stop_sequences or ()),
            stream=bool(request.stream),
        )

    def response_body(self, request: CompletionRequest, response: CompletionResponse) -> Any:
        end = {**_stop(response), "usage": _usage(response, response.completion_tokens)}
        return {**_head(response), "content": _blocks(response), **end}

    def writer(self, request: CompletionRequest) -> "_Writer":
        return _Writer()

    def error(self, error: ApiError) -> Any:
        kind = _KINDS.get(error.status, "api_error")
        where = f"{error.param}: " if error.param else ""
        return {"type": "error", "error": {"type": kind, "message": f"{where}{error}"}}


class _Writer:
    """The reasoning is the first block, then come the text and the calls."""

    def __init__(self) -> None:
        self._started = self._text_open = False
        self._first = 0  # the number of the block after the reasoning

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        head = self._start(response)
        if not self._text_open:
            self._text_open = True
            head += _event("content_block_start", index=self._first, content_block={"type": "text", "text": ""})
        return head + _event("content_block_delta", index=self._first, delta={"type": "text_delta", "text": piece})

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        choice, pieces = response.choices[0], []
        if choice.text[sent[0] :] or not (choice.calls or self._text_open):
            pieces.append(self.text(response, 0, choice.text[sent[0] :]))
        pieces.append(self._start(response))
        if self._text_open:
            pieces.append(_event("content_block_stop", index=self._first))
        blocks = [block for block in _blocks(response) if block["type"] == "tool_use"]
        for index, (block, call) in enumerate(zip(blocks, choice.calls, strict=True), self._first + self._text_open):
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            pieces.append(_event("content_block_start", index=index, content_block={**block, "input": {}}))
            pieces.append(_event("content_block_delta", index=index, delta=delta))
            pieces.append(_event("content_block_stop", index=index))
        usage = _usage(response, response.completion_tokens)
        pieces.append(_event("message_delta", delta=_stop(response), usage=usage))
        return b"".join([*pieces, _event("message_stop")])

    def _start(self, response: CompletionResponse) -> bytes:
        if self._started:
            return b""
        self._started = True
        message = _head(response) | {"content": [], "stop_reason": None, "stop_sequence": None}
        start = _event("message_start", message={**message, "usage": _usage(response, 0)})
        reasoning = response.choices[0].reasoning if response.choices else response.reasoning.get(0)
        if not reasoning:
            return start
        self._first = 1
        delta = {"type": "thinking_delta", "thinking": reasoning}
        return b"".join(
            [
                start,
                _event("content_block_start", index=0, content_block=_thinking("")),
                _event("content_block_delta", index=0, delta=delta),
                _event("content_block_stop", index=0),
            ]
        )


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: only parsed, never generated."""

    _decoder = Decoder(_CountRequest)


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _chat_messages(message: _Message, number: int) -> Iterator[ChatMessage]:
    """An assistant's message stays one; tool results become messages of their own, before the user's text."""
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content)
        return
    param = f"messages.{number}.content"
    texts, calls = [], []
    for block in message.content:
        match block.type:
            case "text":
                texts.append(block.text or "")
            case "tool_use":
                calls.append(ToolCall(block.name or "", arguments(block.input or {}), block.id or ""))
            case "tool_result":
                yield ChatMessage("tool", text_of(block.content, param), call_id=block.tool_use_id or "")
            case kind if kind not in _IGNORED:
                raise invalid(f"content of type {kind!r} is not supported: this model reads text only", param)
    if texts or calls:
        yield ChatMessage(message.role, "".join(texts), tuple(calls))


def _tool_choice(choice: _ToolChoice | None, tools: tuple[Tool, ...]) -> tuple[str | None, bool]:
    if choice is None:
        return None, True
    in_openai: dict[str, Any] = {"auto": "auto", "none": "none", "any": "required", "tool": {"name": choice.name or ""}}
    if choice.type not in in_openai:
        raise invalid(f"the type is auto, any, tool or none, not {choice.type!r}", "tool_choice.type")
    return parse_tool_choice(in_openai[choice.type], tools)


def _head(response: CompletionResponse) -> dict[str, Any]:
    return {"id": f"msg_{response.id}", "type": "message", "role": "assistant", "model": response.model}


def _blocks(response: CompletionResponse) -> list[dict[str, Any]]:
    choice = response.choices[0]
    blocks: list[dict[str, Any]] = [_thinking(choice.reasoning)] if choice.reasoning else []
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        parsed = value(call.arguments)
        inputs = parsed if isinstance(parsed, dict) else {"arguments": parsed}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": inputs})
    return blocks


def _thinking(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _stop(response: CompletionResponse) -> dict[str, Any]:
    choice = response.choices[0]
    reason = "end_turn" if choice.finish == "stop" else "max_tokens"
    if choice.calls or choice.stopped_by is not None:
        reason = "tool_use" if choice.calls else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stopped_by}


def _usage(response: CompletionResponse, made: int) -> dict[str, int]:
    return {
        "input_tokens": len(response.prompt) - response.cached,
        "cache_read_input_tokens": response.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": made,
    }
