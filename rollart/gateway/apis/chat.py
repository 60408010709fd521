"""OpenAI chat completions: POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.gateway.apis.base import DONE, ResponseFormat, StreamWriter, check_format, decode_body, event
from rollart.gateway.apis.openai import (
    FunctionSpec,
    OpenAIApi,
    OpenAIMessage,
    StreamFields,
    TokenCount,
    finish_reason,
    parse_tool_choice,
    tool,
    usage,
)
from rollart.gateway.errors import invalid
from rollart.gateway.messages import CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession


class _Tool(Struct):
    function: FunctionSpec
    type: str = "function"


class _Request(StreamFields, kw_only=True):
    messages: list[OpenAIMessage]
    model: str = ""
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None


class ChatCompletions(OpenAIApi):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, session: EpisodeSession) -> CompletionRequest:
        request = decode_body(self._decoder, body)
        if not request.messages:
            raise invalid("there must be at least one message", "messages")
        check_format(request.response_format, "response_format")
        tools = tuple(tool(each.function) for each in request.tools or ())
        limit = request.max_completion_tokens
        force, parse_calls = parse_tool_choice(request.tool_choice, tools)
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
            **self._head(response, "chat.completion"),
            "choices": [self._choice(request, number, choice) for number, choice in enumerate(response.choices)],
            "usage": usage(response),
        }
        if request.token_ids:
            body["prompt_token_ids"] = response.prompt
        return body

    def _head(self, response: CompletionResponse, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{response.id}", "object": kind, "created": response.created, "model": response.model}

    def _choice(self, request: CompletionRequest, number: int, choice: CompletionChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
        if choice.calls:
            message["tool_calls"] = _calls(choice)
        body: dict[str, Any] = {
            "index": number,
            "message": message,
            "logprobs": self.logprobs(choice) if request.logprobs else None,
            "finish_reason": finish_reason(choice),
        }
        if request.token_ids:
            body["token_ids"] = choice.tokens
        return body

    def writer(self, request: CompletionRequest) -> StreamWriter:
        return _Writer(self, request)

    def chunk(self, response: CompletionResponse, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head(response, "chat.completion.chunk"), "choices": choices, **more})


class _Writer:
    """Logprobs and token ids come with the end of their choice."""

    def __init__(self, api: ChatCompletions, request: CompletionRequest) -> None:
        self._api, self._request = api, request
        self._begun: set[int] = set()

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        return self._opened(response, index) + self._delta(response, index, {"content": piece})

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        pieces = []
        for index, choice in enumerate(response.choices):
            pieces.append(self._opened(response, index))
            if rest := choice.text[sent[index] :]:
                pieces.append(self._delta(response, index, {"content": rest}))
            for number, call in enumerate(_calls(choice)):
                pieces.append(self._delta(response, index, {"tool_calls": [{"index": number, **call}]}))
            last: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": finish_reason(choice)}
            if self._request.logprobs:
                last["logprobs"] = self._api.logprobs(choice)
            if self._request.token_ids:
                last["token_ids"] = choice.tokens
            pieces.append(self._api.chunk(response, [last]))
        if self._request.usage_in_stream:
            pieces.append(self._api.chunk(response, [], usage=usage(response)))
        return b"".join([*pieces, DONE])

    def _opened(self, response: CompletionResponse, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._delta(response, index, {"role": "assistant", "content": ""})

    def _delta(self, response: CompletionResponse, index: int, delta: dict[str, Any]) -> bytes:
        return self._api.chunk(response, [{"index": index, "delta": delta, "finish_reason": None}])


def _calls(choice: CompletionChoice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]
