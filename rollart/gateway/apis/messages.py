"""Anthropic messages: POST /v1/messages."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.json import Decoder

from rollart.gateway.apis.base import Format, Part, Writer, check_format, event, read, text_of
from rollart.gateway.apis.openai import Count, Share, arguments
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import (
    ChatMessage,
    CompletionChoice,
    CompletionRequest,
    CompletionResponse,
    Tool,
    ToolCall,
)
from rollart.gateway.tenant import Tenant
from rollart.gateway.tools import value

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
_UNSEEN = ("thinking", "redacted_thinking")


class _Block(Struct):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Part] | None = None


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
    format: Format | None = None


class _Request(Struct):
    messages: list[_Message]
    max_tokens: Count
    model: str = ""
    system: str | list[Part] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _Output | None = None


class _CountRequest(_Request):
    max_tokens: Count = 1


class Messages:
    speaks = True
    _decoder: "Decoder[Any]" = Decoder(_Request)

    def parse(self, body: bytes, tenant: Tenant) -> CompletionRequest:
        request = read(self._decoder, body)
        if not request.messages:
            raise invalid("there must be at least one message", "messages")
        check_format(
            request.output_config.format if request.output_config is not None else None, "output_config.format"
        )
        said = [one for number, message in enumerate(request.messages) for one in _said(message, number)]
        if system := text_of(request.system, "system"):
            said.insert(0, ChatMessage("system", system))
        prefix = ""
        if said[-1].role == "assistant" and not said[-1].calls:
            prefix = said.pop().text  # the model goes on with what it is made to have said
        tools = tuple(Tool(tool.name, tool.description or "", tool.input_schema or {}) for tool in request.tools or ())
        force, calls = _wanted(request.tool_choice, tools)
        return CompletionRequest(
            model=request.model,
            messages=tuple(said),
            tools=tools,
            force=force,
            calls=calls,
            prefix=prefix,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=tuple(request.stop_sequences or ()),
            stream=bool(request.stream),
        )

    def whole(self, ask: CompletionRequest, answer: CompletionResponse) -> Any:
        choice = answer.choices[0]
        return {
            **self._head(answer),
            "content": _blocks(choice),
            "stop_reason": _reason(choice),
            "stop_sequence": choice.stopped_by,
            "usage": _usage(answer, answer.made),
        }

    def _head(self, answer: CompletionResponse) -> dict[str, Any]:
        return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}

    def writer(self, ask: CompletionRequest) -> Writer:
        return _Writer(self)

    def start(self, answer: CompletionResponse) -> bytes:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
        return _event("message_start", message={**self._head(answer), **empty})

    def error(self, error: ApiError) -> Any:
        kind = _KINDS.get(error.status, "api_error")
        where = f"{error.param}: " if error.param else ""
        return {"type": "error", "error": {"type": kind, "message": f"{where}{error}"}}

    def served(self, ask: CompletionRequest, answer: CompletionResponse, tenant: Tenant) -> None:
        """Nothing to remember: clients repeat the conversation."""


class _Writer:
    """The text is the first block, calls are those after it."""

    def __init__(self, api: Messages) -> None:
        self._api = api
        self._started = self._speaking = False

    def text(self, answer: CompletionResponse, index: int, piece: str) -> bytes:
        head = b""
        if not self._speaking:
            self._speaking = True
            head = self._start(answer) + _event(
                "content_block_start", index=0, content_block={"type": "text", "text": ""}
            )
        return head + _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece})

    def end(self, answer: CompletionResponse, shown: Sequence[int]) -> bytes:
        choice, pieces = answer.choices[0], []
        if choice.text[shown[0] :] or not (choice.calls or self._speaking):
            pieces.append(self.text(answer, 0, choice.text[shown[0] :]))
        pieces.append(self._start(answer))
        if self._speaking:
            pieces.append(_event("content_block_stop", index=0))
        blocks = [block for block in _blocks(choice) if block["type"] == "tool_use"]
        for index, (block, call) in enumerate(zip(blocks, choice.calls, strict=True), start=self._speaking):
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            pieces.append(_event("content_block_start", index=index, content_block={**block, "input": {}}))
            pieces.append(_event("content_block_delta", index=index, delta=delta))
            pieces.append(_event("content_block_stop", index=index))
        end = {"stop_reason": _reason(choice), "stop_sequence": choice.stopped_by}
        pieces.append(_event("message_delta", delta=end, usage=_usage(answer, answer.made)))
        return b"".join([*pieces, _event("message_stop")])

    def _start(self, answer: CompletionResponse) -> bytes:
        if self._started:
            return b""
        self._started = True
        return self._api.start(answer)


class CountTokens(Messages):
    """POST /v1/messages/count_tokens: only parsed, never generated."""

    _decoder = Decoder(_CountRequest)


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _said(message: _Message, number: int) -> Iterator[ChatMessage]:
    """An assistant's message stays one; results of tools become messages of their own, before what the user says."""
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
                yield ChatMessage("tool", text_of(block.content, param), answers=block.tool_use_id or "")
            case kind if kind not in _UNSEEN:
                raise invalid(f"content of type {kind!r} cannot be read here: this model knows text only", param)
    if texts or calls:
        yield ChatMessage(message.role, "".join(texts), tuple(calls))


def _wanted(choice: _ToolChoice | None, tools: tuple[Tool, ...]) -> tuple[str | None, bool]:
    kind = choice.type if choice is not None else "auto"
    if kind in ("auto", "none"):
        return None, kind == "auto"
    name = (choice.name or "") if choice is not None and kind == "tool" else ""
    if kind not in ("any", "tool"):
        raise invalid(f"the type is auto, any, tool or none, not {kind!r}", "tool_choice.type")
    if not tools or (name and name not in [tool.name for tool in tools]):
        raise invalid(f"{name or 'a tool'} is asked for, which is not among the tools", "tool_choice")
    return name, True


def _blocks(choice: CompletionChoice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": choice.text}] if choice.text or not choice.calls else []
    for call in choice.calls:
        said = value(call.arguments)
        inputs = said if isinstance(said, dict) else {"arguments": said}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": inputs})
    return blocks


def _reason(choice: CompletionChoice) -> str:
    if choice.calls:
        return "tool_use"
    if choice.stopped_by is not None:
        return "stop_sequence"
    return "end_turn" if choice.finish == "stop" else "max_tokens"


def _usage(answer: CompletionResponse, made: int) -> dict[str, int]:
    return {
        "input_tokens": len(answer.prompt) - answer.cached,
        "cache_read_input_tokens": answer.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": made,
    }
