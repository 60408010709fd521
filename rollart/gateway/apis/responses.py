"""OpenAI responses: POST /v1/responses. A conversation may be continued by the id of an earlier response of the key."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.core.action import Tool, ToolCall
from rollart.gateway.apis.base import ContentPart, ResponseFormat, check_format, decode_body, event, text_of
from rollart.gateway.apis.openai import OpenAIApi, Probability, Temperature, TokenCount, arguments, parse_tool_choice
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import ChatMessage, CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession


class _Item(Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: str | list[ContentPart] | None = None


class _Tool(Struct):
    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(Struct):
    format: ResponseFormat | None = None


class _Request(Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: _Text | None = None


class Responses(OpenAIApi):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, session: EpisodeSession) -> CompletionRequest:
        request = decode_body(self._decoder, body)
        check_format(request.text.format if request.text else None, "text.format")
        before: tuple[ChatMessage, ...] = ()
        if request.previous_response_id is not None:
            found = session.responses.get(request.previous_response_id)
            if found is None:
                reason = f"there is no response {request.previous_response_id!r} of this key"
                raise ApiError(404, reason, param="previous_response_id", code="previous_response_not_found")
            before = found
        if request.instructions:
            before = (
                ChatMessage("system", request.instructions),
                *(message for message in before if message.role != "system"),
            )
        items = [_Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        messages = (*before, *_merged(items))
        if not messages:
            raise invalid("input is empty", "input")
        tools = tuple(_tools(request.tools or []))
        force, parse_calls = parse_tool_choice(request.tool_choice, tools)
        return CompletionRequest(
            model=request.model,
            messages=messages,
            tools=tools,
            force=force,
            parse_calls=parse_calls,
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            stream=bool(request.stream),
        )

    def on_delivered(self, request: CompletionRequest, response: CompletionResponse, session: EpisodeSession) -> None:
        answer = ChatMessage("assistant", response.choices[0].text, response.choices[0].calls)
        session.remember(f"resp_{response.id}", (*request.messages, answer))

    def response_body(self, request: CompletionRequest, response: CompletionResponse) -> Any:
        choice = response.choices[0]
        short = choice.finish == "length" and not choice.calls
        return {
            **_head(request, response),
            "status": "incomplete" if short else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": _output(response),
            "usage": _usage(response),
        }

    def writer(self, request: CompletionRequest) -> "_Writer":
        return _Writer(self, request)


class _Writer:
    def __init__(self, api: Responses, request: CompletionRequest) -> None:
        self._api, self._request = api, request
        self._numbers = count()
        self._started = self._text_open = False

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        head = b""
        if not self._text_open:
            self._text_open = True
            item = {**_message(response.id, ""), "status": "in_progress", "content": []}
            head = self._start(response) + self._event("response.output_item.added", output_index=0, item=item)
            head += self._event("response.content_part.added", part=_part(""), **_at(response))
        return head + self._event("response.output_text.delta", delta=piece, logprobs=[], **_at(response))

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        choice, pieces, whole = response.choices[0], [], self._api.response_body(self._request, response)
        if choice.text[sent[0] :] or not (choice.calls or self._text_open):
            pieces.append(self.text(response, 0, choice.text[sent[0] :]))
        pieces.append(self._start(response))
        for index, item in enumerate(whole["output"]):
            pieces += (
                self._text_done(response, choice.text) if item["type"] == "message" else self._call_events(index, item)
            )
            pieces.append(self._event("response.output_item.done", output_index=index, item=item))
        return b"".join([*pieces, self._event(f"response.{whole['status']}", response=whole)])

    def _text_done(self, response: CompletionResponse, text: str) -> list[bytes]:
        return [
            self._event("response.output_text.done", text=text, logprobs=[], **_at(response)),
            self._event("response.content_part.done", part=_part(text), **_at(response)),
        ]

    def _call_events(self, index: int, item: dict[str, Any]) -> list[bytes]:
        at, arguments = {"item_id": item["id"], "output_index": index}, item["arguments"]
        added = {**item, "status": "in_progress", "arguments": ""}
        return [
            self._event("response.output_item.added", output_index=index, item=added),
            self._event("response.function_call_arguments.delta", delta=arguments, **at),
            self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"], **at),
        ]

    def _start(self, response: CompletionResponse) -> bytes:
        if self._started:
            return b""
        self._started = True
        begun = _head(self._request, response) | {"status": "in_progress", "incomplete_details": None}
        begun |= {"output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def _event(self, kind: str, **data: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **data}, kind)


def _merged(items: list[_Item]) -> list[ChatMessage]:
    """Calls are merged into the assistant's message before them, as they were generated."""
    messages: list[ChatMessage] = []
    for number, item in enumerate(items):
        param = f"input[{number}]"
        match item.type:
            case "message":
                messages.append(ChatMessage(item.role or "user", text_of(item.content, f"{param}.content")))
            case "function_call":
                call = ToolCall(item.name or "", arguments(item.arguments or "{}"), item.call_id or "")
                if messages and messages[-1].role == "assistant":
                    last = messages[-1]
                    messages[-1] = ChatMessage("assistant", last.text, (*last.calls, call))
                else:
                    messages.append(ChatMessage("assistant", "", (call,)))
            case "function_call_output":
                messages.append(
                    ChatMessage("tool", text_of(item.output, f"{param}.output"), call_id=item.call_id or "")
                )
            case kind if kind != "reasoning":
                raise invalid(f"an item of type {kind!r} is not supported", f"{param}.type")
    return messages


def _tools(tools: list[_Tool]) -> Iterator[Tool]:
    for number, tool in enumerate(tools):
        if tool.type != "function" or not tool.name:
            raise invalid(f"a tool of type {tool.type!r} is not supported, only functions", f"tools[{number}].type")
        yield Tool(tool.name, tool.description or "", tool.parameters or {})


def _head(request: CompletionRequest, response: CompletionResponse) -> dict[str, Any]:
    return {
        "id": f"resp_{response.id}",
        "object": "response",
        "created_at": response.created,
        "model": response.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tool_choice": "auto" if request.parse_calls else "none",
        "tools": [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in request.tools
        ],
    }


def _output(response: CompletionResponse) -> list[dict[str, Any]]:
    choice = response.choices[0]
    output = [_message(response.id, choice.text)] if choice.text or not choice.calls else []
    for index, call in enumerate(choice.calls):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{response.id}_{index}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return output


def _message(number: str, text: str) -> dict[str, Any]:
    head = {"type": "message", "id": f"msg_{number}", "status": "completed", "role": "assistant"}
    return {**head, "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _at(response: CompletionResponse) -> dict[str, Any]:
    """Where the text of a response is."""
    return {"item_id": f"msg_{response.id}", "output_index": 0, "content_index": 0}


def _usage(response: CompletionResponse) -> dict[str, Any]:
    prompt = len(response.prompt)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": response.cached},
        "output_tokens": response.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + response.completion_tokens,
    }
