"""OpenAI chat completions: POST /v1/chat/completions."""

from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.gateway.apis.base import event, read, slices
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
from rollart.gateway.tenant import Tenant
from rollart.gateway.words import Answer, Ask, Choice


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


class ChatCompletions(OpenAI):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, tenant: Tenant) -> Ask:
        request = read(self._decoder, body)
        if not request.messages:
            raise invalid("there must be at least one message", "messages")
        tools = tuple(tool(each.function) for each in request.tools or ())
        limit = request.max_completion_tokens
        force, calls = wanted(request.tool_choice, tools)
        return Ask(
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

    def whole(self, ask: Ask, answer: Answer) -> Any:
        said: dict[str, Any] = {
            **self._head(answer, "chat.completion"),
            "choices": [self._choice(ask, number, choice) for number, choice in enumerate(answer.choices)],
            "usage": usage(answer),
        }
        if ask.token_ids:
            said["prompt_token_ids"] = answer.prompt
        return said

    def _head(self, answer: Answer, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}

    def _choice(self, ask: Ask, number: int, choice: Choice) -> dict[str, Any]:
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

    def stream(self, ask: Ask, answer: Answer) -> Iterator[bytes]:
        head = self._head(answer, "chat.completion.chunk")
        for number, choice in enumerate(answer.choices):
            for delta, more in self._deltas(ask, choice):
                yield event({**head, "choices": [{"index": number, "delta": delta, "finish_reason": None, **more}]})
            yield event({**head, "choices": [{"index": number, "delta": {}, "finish_reason": finish_reason(choice)}]})
        if ask.usage_in_stream:
            yield event({**head, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"

    def _deltas(self, ask: Ask, choice: Choice) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        more: dict[str, Any] = {"logprobs": self.logprobs(choice)} if ask.logprobs else {}
        if ask.token_ids:
            more["token_ids"] = choice.tokens
        yield {"role": "assistant", "content": ""}, more
        for piece in slices(choice.text):
            yield {"content": piece}, {}
        for index, call in enumerate(_calls(choice)):
            yield {"tool_calls": [{"index": index, **call}]}, {}


def _calls(choice: Choice) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]
