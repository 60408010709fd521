"""OpenAI chat completions: POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.core.action import Tool, ToolCall
from rollart.gateway.apis import openai
from rollart.gateway.apis.base import ContentPart, ResponseFormat, check_format, decode_body, text_of
from rollart.gateway.errors import invalid
from rollart.gateway.messages import ChatMessage, CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession


class _Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Struct):
    function: _Function
    type: str = "function"


class _FunctionCall(Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _ToolCall(Struct):
    function: _FunctionCall
    id: str | None = None


class _Message(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    def chat_message(self, number: int) -> ChatMessage:
        calls = tuple(
            ToolCall(call.function.name, openai.arguments(call.function.arguments), call.id or "")
            for call in self.tool_calls or ()
        )
        text = text_of(self.content, f"messages[{number}].content")
        return ChatMessage(self.role, text, calls, self.tool_call_id or "")


class _Request(openai.StreamFields, kw_only=True):
    messages: list[_Message]
    model: str = ""
    max_completion_tokens: openai.TokenCount | None = None
    logprobs: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


class ChatCompletions(openai.OpenAIApi):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, session: EpisodeSession) -> CompletionRequest:
        request = decode_body(self._decoder, body)
        if not request.messages:
            raise invalid("there must be at least one message", "messages")
        check_format(request.response_format, "response_format")
        functions = [tool.function for tool in request.tools or ()]
        tools = tuple(Tool(each.name, each.description or "", each.parameters or {}) for each in functions)
        limit = request.max_completion_tokens
        force, parse_calls = openai.parse_tool_choice(request.tool_choice, tools)
        return CompletionRequest(
            model=request.model,
            messages=tuple(message.chat_message(number) for number, message in enumerate(request.messages)),
            tools=tools,
            force=force,
            parse_calls=parse_calls,
            **request.sampling() | ({"max_tokens": limit} if limit else {}),
            logprobs=bool(request.logprobs),
            token_ids=bool(request.return_token_ids),
            **request.streaming(),
        )

    def response_body(self, request: CompletionRequest, response: CompletionResponse) -> Any:
        body: dict[str, Any] = {
            **openai.head(response, "chatcmpl", "chat.completion"),
            "choices": [self._choice(request, response, number) for number in range(len(response.choices))],
            "usage": openai.usage(response),
        }
        if request.token_ids:
            body["prompt_token_ids"] = response.prompt
        return body

    def _choice(self, request: CompletionRequest, response: CompletionResponse, number: int) -> dict[str, Any]:
        choice = response.choices[number]
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = _calls(choice.calls)
        body: dict[str, Any] = {
            "index": number,
            "message": message,
            "logprobs": self.logprobs(choice) if request.logprobs else None,
            "finish_reason": "tool_calls" if choice.calls else choice.finish,
        }
        if request.token_ids:
            body["token_ids"] = choice.tokens
        return body

    def writer(self, request: CompletionRequest) -> "_Writer":
        return _Writer(self, request)


class _Writer(openai.ChunkWriter):
    """Logprobs and token ids come with the end of their choice."""

    def __init__(self, api: ChatCompletions, request: CompletionRequest) -> None:
        super().__init__(request, "chatcmpl", "chat.completion.chunk")
        self._api = api
        self._begun: set[int] = set()

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        return self._opened(response, index) + self._delta(response, index, {"content": piece})

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        pieces = []
        for index, choice in enumerate(response.choices):
            pieces.append(self._opened(response, index))
            if rest := choice.text[sent[index] :]:
                pieces.append(self._delta(response, index, {"content": rest}))
            for number, call in enumerate(_calls(choice.calls)):
                pieces.append(self._delta(response, index, {"tool_calls": [{"index": number, **call}]}))
            reason = "tool_calls" if choice.calls else choice.finish
            last: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": reason}
            if self._request.logprobs:
                last["logprobs"] = self._api.logprobs(choice)
            if self._request.token_ids:
                last["token_ids"] = choice.tokens
            pieces.append(self.chunk(response, [last]))
        return b"".join([*pieces, self.last(response)])

    def _opened(self, response: CompletionResponse, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        opened = self._delta(response, index, {"role": "assistant", "content": ""})
        reasoning = response.choices[index].reasoning if response.choices else response.reasoning.get(index)
        return opened + self._delta(response, index, {"reasoning_content": reasoning}) if reasoning else opened

    def _delta(self, response: CompletionResponse, index: int, delta: dict[str, Any]) -> bytes:
        return self.chunk(response, [{"index": index, "delta": delta, "finish_reason": None}])


def _calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]
