"""OpenAI chat completions: POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.gateway.apis.base import DONE, Format, Writer, check_format, event, read
from rollart.gateway.apis.openai import (
    Count,
    Function,
    Message,
    OpenAI,
    Streamed,
    finish_reason,
    tool,
    usage,
    wanted,
)
from rollart.gateway.errors import invalid
from rollart.gateway.messages import CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.tenant import Tenant


class _Tool(Struct):
    function: Function
    type: str = "function"


class _Request(Streamed, kw_only=True):
    messages: list[Message]
    model: str = ""
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    return_token_ids: bool | None = None
    response_format: Format | None = None


class ChatCompletions(OpenAI):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, tenant: Tenant) -> CompletionRequest:
        request = read(self._decoder, body)
        if not request.messages:
            raise invalid("there must be at least one message", "messages")
        check_format(request.response_format, "response_format")
        tools = tuple(tool(each.function) for each in request.tools or ())
        limit = request.max_completion_tokens
        force, calls = wanted(request.tool_choice, tools)
        return CompletionRequest(
            model=request.model,
            messages=tuple(message.said(number) for number, message in enumerate(request.messages)),
            tools=tools,
            force=force,
            calls=calls,
            **request.drawing() | ({"max_tokens": limit} if limit else {}),
            logprobs=bool(request.logprobs),
            token_ids=bool(request.return_token_ids),
            **request.streaming(),
        )

    def whole(self, ask: CompletionRequest, answer: CompletionResponse) -> Any:
        said: dict[str, Any] = {
            **self._head(answer, "chat.completion"),
            "choices": [self._choice(ask, number, choice) for number, choice in enumerate(answer.choices)],
            "usage": usage(answer),
        }
        if ask.token_ids:
            said["prompt_token_ids"] = answer.prompt
        return said

    def _head(self, answer: CompletionResponse, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}

    def _choice(self, ask: CompletionRequest, number: int, choice: CompletionChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text or (None if choice.calls else "")}
        if choice.calls:
            message["tool_calls"] = _calls(choice)
        said: dict[str, Any] = {
            "index": number,
            "message": message,
            "logprobs": self.logprobs(choice) if ask.logprobs else None,
            "finish_reason": finish_reason(choice),
        }
        if ask.token_ids:
            said["token_ids"] = choice.tokens
        return said

    def writer(self, ask: CompletionRequest) -> Writer:
        return _Writer(self, ask)

    def chunk(self, answer: CompletionResponse, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head(answer, "chat.completion.chunk"), "choices": choices, **more})


class _Writer:
    """What belongs to tokens comes with the end of their choice, when all of them are there."""

    def __init__(self, api: ChatCompletions, ask: CompletionRequest) -> None:
        self._api, self._ask = api, ask
        self._begun: set[int] = set()

    def text(self, answer: CompletionResponse, index: int, piece: str) -> bytes:
        return self._opened(answer, index) + self._delta(answer, index, {"content": piece})

    def end(self, answer: CompletionResponse, shown: Sequence[int]) -> bytes:
        pieces = []
        for index, choice in enumerate(answer.choices):
            pieces.append(self._opened(answer, index))
            if rest := choice.text[shown[index] :]:
                pieces.append(self._delta(answer, index, {"content": rest}))
            for number, call in enumerate(_calls(choice)):
                pieces.append(self._delta(answer, index, {"tool_calls": [{"index": number, **call}]}))
            last: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": finish_reason(choice)}
            if self._ask.logprobs:
                last["logprobs"] = self._api.logprobs(choice)
            if self._ask.token_ids:
                last["token_ids"] = choice.tokens
            pieces.append(self._api.chunk(answer, [last]))
        if self._ask.usage_in_stream:
            pieces.append(self._api.chunk(answer, [], usage=usage(answer)))
        return b"".join([*pieces, DONE])

    def _opened(self, answer: CompletionResponse, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._delta(answer, index, {"role": "assistant", "content": ""})

    def _delta(self, answer: CompletionResponse, index: int, delta: dict[str, Any]) -> bytes:
        return self._api.chunk(answer, [{"index": index, "delta": delta, "finish_reason": None}])


def _calls(choice: CompletionChoice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]
