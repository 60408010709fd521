"""What OpenAI's APIs have in common: errors, tools, usage, logprobs, chunks of a stream."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollart.core.action import Tool
from rollart.gateway.apis.base import DONE, Api, event
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.template import ChatTemplate

TokenCount = Annotated[int, Meta(ge=1)]
ChoiceCount = Annotated[int, Meta(ge=1, le=128)]
Seed = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Probability = Annotated[float, Meta(gt=0, le=1)]
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class StreamOptions(Struct):
    include_usage: bool = False


class SamplingFields(Struct, kw_only=True):
    """Sampling fields of every request."""

    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: int | None = None
    n: ChoiceCount | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None

    def sampling(self) -> dict[str, Any]:
        """As fields of a CompletionRequest."""
        keys = ("max_tokens", "temperature", "top_p", "top_k", "seed")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return {key: getattr(self, key) for key in keys} | {"n": self.n or 1, "stop": stop}


class StreamFields(SamplingFields, kw_only=True):
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def streaming(self) -> dict[str, Any]:
        options = self.stream_options
        return {"stream": bool(self.stream), "usage_in_stream": options is not None and options.include_usage}


class OpenAIApi(Api):
    """`template` decodes tokens for logprobs."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def error(self, error: ApiError) -> Any:
        kind = _KINDS.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}

    def piece(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._template.piece(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}

    def logprobs(self, choice: CompletionChoice) -> dict[str, Any]:
        pairs = zip(choice.tokens, choice.logprobs, strict=True)
        return {"content": [self.piece(token, logprob) for token, logprob in pairs], "refusal": None}


class ChunkWriter:
    """Streams a response as chunks with `choices`; `prefix` is that of their id, `kind` their object."""

    def __init__(self, request: CompletionRequest, prefix: str, kind: str) -> None:
        self._request, self._prefix, self._kind = request, prefix, kind

    def chunk(self, response: CompletionResponse, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**head(response, self._prefix, self._kind), "choices": choices, **more})

    def last(self, response: CompletionResponse) -> bytes:
        usages = self.chunk(response, [], usage=usage(response)) if self._request.usage_in_stream else b""
        return usages + DONE


def head(response: CompletionResponse, prefix: str, kind: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{response.id}", "object": kind, "created": response.created, "model": response.model}


def arguments(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def parse_tool_choice(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> tuple[str | None, bool]:
    """`force` and `parse_calls` of a request, from its `tool_choice`."""
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
        raise invalid(f"tool_choice names {name or 'a tool'}, which is not among the tools", "tool_choice")
    return name, True


def usage(response: CompletionResponse) -> dict[str, Any]:
    prompt = len(response.prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": response.completion_tokens,
        "total_tokens": prompt + response.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": response.cached},
    }
