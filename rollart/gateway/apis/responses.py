"""OpenAI responses: POST /v1/responses. A conversation may be continued by the id of an earlier response of the key."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.gateway.apis.base import Format, Part, Writer, check_format, conversation, event, read, text_of
from rollart.gateway.apis.openai import Count, Heat, OpenAI, Share, arguments, wanted
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


class _Item(Struct):
    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None
    output: str | list[Part] | None = None


class _Tool(Struct):
    type: str = "function"
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(Struct):
    format: Format | None = None


class _Request(Struct):
    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Count | None = None
    temperature: Heat | None = None
    top_p: Share | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: _Text | None = None


class Responses(OpenAI):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, tenant: Tenant) -> CompletionRequest:
        request = read(self._decoder, body)
        check_format(request.text.format if request.text is not None else None, "text.format")
        before: tuple[ChatMessage, ...] = ()
        if request.previous_response_id is not None:
            found = tenant.responses.get(request.previous_response_id)
            if found is None:
                raise ApiError(
                    404,
                    f"there is no response {request.previous_response_id!r} of this key",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            before = found
        if request.instructions:
            before = (ChatMessage("system", request.instructions), *(said for said in before if said.role != "system"))
        items = [_Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        messages = (*before, *_merged(items))
        if not messages:
            raise invalid("input is empty", "input")
        tools = tuple(_tools(request.tools or []))
        force, calls = wanted(request.tool_choice, tools)
        return CompletionRequest(
            model=request.model,
            messages=messages,
            tools=tools,
            force=force,
            calls=calls,
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            stream=bool(request.stream),
        )

    def served(self, ask: CompletionRequest, answer: CompletionResponse, tenant: Tenant) -> None:
        tenant.remember(f"resp_{answer.id}", conversation(ask, answer.choices[0]))

    def whole(self, ask: CompletionRequest, answer: CompletionResponse) -> Any:
        choice = answer.choices[0]
        short = choice.finish == "length" and not choice.calls
        return {
            **_head(ask, answer),
            "status": "incomplete" if short else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if short else None,
            "output": _output(answer.id, choice),
            "usage": _usage(answer),
        }

    def begun(self, ask: CompletionRequest, answer: CompletionResponse) -> dict[str, Any]:
        return {
            **_head(ask, answer),
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def writer(self, ask: CompletionRequest) -> Writer:
        return _Writer(self, ask)


class _Writer:
    def __init__(self, api: Responses, ask: CompletionRequest) -> None:
        self._api, self._ask = api, ask
        self._numbers = count()
        self._started = self._speaking = False

    def text(self, answer: CompletionResponse, index: int, piece: str) -> bytes:
        head = b""
        if not self._speaking:
            self._speaking = True
            item = {**_message(answer.id, ""), "status": "in_progress", "content": []}
            head = self._start(answer) + self._told("response.output_item.added", output_index=0, item=item)
            head += self._told("response.content_part.added", part=_part(""), **_at(answer))
        return head + self._told("response.output_text.delta", delta=piece, logprobs=[], **_at(answer))

    def end(self, answer: CompletionResponse, shown: Sequence[int]) -> bytes:
        choice, pieces, whole = answer.choices[0], [], self._api.whole(self._ask, answer)
        if rest := choice.text[shown[0] :]:
            pieces.append(self.text(answer, 0, rest))
        elif not (choice.calls or self._speaking):
            pieces.append(self.text(answer, 0, ""))
        pieces.append(self._start(answer))
        for index, item in enumerate(whole["output"]):
            pieces += self._said(answer, choice.text) if item["type"] == "message" else self._called(index, item)
            pieces.append(self._told("response.output_item.done", output_index=index, item=item))
        return b"".join([*pieces, self._told(f"response.{whole['status']}", response=whole)])

    def _said(self, answer: CompletionResponse, text: str) -> list[bytes]:
        return [
            self._told("response.output_text.done", text=text, logprobs=[], **_at(answer)),
            self._told("response.content_part.done", part=_part(text), **_at(answer)),
        ]

    def _called(self, index: int, item: dict[str, Any]) -> list[bytes]:
        at, said = {"item_id": item["id"], "output_index": index}, item["arguments"]
        added = {**item, "status": "in_progress", "arguments": ""}
        return [
            self._told("response.output_item.added", output_index=index, item=added),
            self._told("response.function_call_arguments.delta", delta=said, **at),
            self._told("response.function_call_arguments.done", arguments=said, name=item["name"], **at),
        ]

    def _start(self, answer: CompletionResponse) -> bytes:
        if self._started:
            return b""
        self._started = True
        begun = self._api.begun(self._ask, answer)
        return self._told("response.created", response=begun) + self._told("response.in_progress", response=begun)

    def _told(self, kind: str, **data: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(self._numbers), **data}, kind)


def _merged(items: list[_Item]) -> list[ChatMessage]:
    """Calls belong to the assistant's message before them, as they did when they were made."""
    said: list[ChatMessage] = []
    for number, item in enumerate(items):
        param = f"input[{number}]"
        match item.type:
            case "message":
                said.append(ChatMessage(item.role or "user", text_of(item.content, f"{param}.content")))
            case "function_call":
                call = ToolCall(item.name or "", arguments(item.arguments or "{}"), item.call_id or "")
                if said and said[-1].role == "assistant":
                    said[-1] = ChatMessage("assistant", said[-1].text, (*said[-1].calls, call))
                else:
                    said.append(ChatMessage("assistant", "", (call,)))
            case "function_call_output":
                said.append(ChatMessage("tool", text_of(item.output, f"{param}.output"), answers=item.call_id or ""))
            case kind if kind != "reasoning":
                raise invalid(f"an item of type {kind!r} is not offered here", f"{param}.type")
    return said


def _tools(tools: list[_Tool]) -> Iterator[Tool]:
    for number, tool in enumerate(tools):
        if tool.type != "function" or not tool.name:
            raise invalid(f"a tool of type {tool.type!r} is not offered here, only functions", f"tools[{number}].type")
        yield Tool(tool.name, tool.description or "", tool.parameters or {})


def _head(ask: CompletionRequest, answer: CompletionResponse) -> dict[str, Any]:
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "model": answer.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "tool_choice": "auto" if ask.calls else "none",
        "tools": [
            {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in ask.tools
        ],
    }


def _output(number: str, choice: CompletionChoice) -> list[dict[str, Any]]:
    output = [_message(number, choice.text)] if choice.text or not choice.calls else []
    for index, call in enumerate(choice.calls):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{number}_{index}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return output


def _message(number: str, text: str) -> dict[str, Any]:
    said = {"type": "message", "id": f"msg_{number}", "status": "completed", "role": "assistant"}
    return {**said, "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _at(answer: CompletionResponse) -> dict[str, Any]:
    """Where the text of an answer is."""
    return {"item_id": f"msg_{answer.id}", "output_index": 0, "content_index": 0}


def _usage(answer: CompletionResponse) -> dict[str, Any]:
    prompt = len(answer.prompt)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.cached},
        "output_tokens": answer.made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + answer.made,
    }
