"""OpenAI completions: POST /v1/completions. The prompt is text or tokens, as it stands."""

from collections.abc import Sequence
from typing import Any

from msgspec.json import Decoder

from rollart.gateway.apis.base import DONE, StreamWriter, decode_body, event
from rollart.gateway.apis.openai import OpenAIApi, StreamFields, usage
from rollart.gateway.errors import invalid
from rollart.gateway.messages import CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession


class _Request(StreamFields, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str = ""
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None


class Completions(OpenAIApi):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, session: EpisodeSession) -> CompletionRequest:
        request = decode_body(self._decoder, body)
        for name in ("echo", "suffix"):
            if getattr(request, name):
                raise invalid(f"{name} is not supported", name)
        text, tokens = _prompt(request.prompt)
        return CompletionRequest(
            model=request.model,
            text=text,
            tokens=tokens,
            **request.sampling(),
            logprobs=request.logprobs is not None,
            token_ids=bool(request.return_token_ids),
            **request.streaming(),
        )

    def response_body(self, request: CompletionRequest, response: CompletionResponse) -> Any:
        choices = [self._choice(request, response, number) for number in range(len(response.choices))]
        return {**self._head(response), "choices": choices, "usage": usage(response)}

    def _head(self, response: CompletionResponse) -> dict[str, Any]:
        return {
            "id": f"cmpl-{response.id}",
            "object": "text_completion",
            "created": response.created,
            "model": response.model,
        }

    def _choice(self, request: CompletionRequest, response: CompletionResponse, number: int) -> dict[str, Any]:
        choice = response.choices[number]
        body: dict[str, Any] = {
            "index": number,
            "text": choice.text,
            "logprobs": self._listed(choice) if request.logprobs else None,
            "finish_reason": choice.finish,
        }
        if request.token_ids:
            body |= {"token_ids": choice.tokens, "prompt_token_ids": response.prompt}
        return body

    def _listed(self, choice: CompletionChoice) -> dict[str, Any]:
        pieces = [self._template.piece(token) for token in choice.tokens]
        offsets = [0]
        for piece in pieces[:-1]:
            offsets.append(offsets[-1] + len(piece))
        return {
            "tokens": pieces,
            "token_logprobs": choice.logprobs,
            "top_logprobs": None,
            "text_offset": offsets[: len(pieces)],
        }

    def writer(self, request: CompletionRequest) -> StreamWriter:
        return _Writer(self, request)

    def chunk(self, response: CompletionResponse, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head(response), "choices": choices, **more})

    def last(self, request: CompletionRequest, response: CompletionResponse, index: int, rest: str) -> dict[str, Any]:
        return {**self._choice(request, response, index), "text": rest}


class _Writer:
    def __init__(self, api: Completions, request: CompletionRequest) -> None:
        self._api, self._request = api, request

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        return self._api.chunk(response, [{"index": index, "text": piece, "finish_reason": None}])

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        rests = [choice.text[sent[index] :] for index, choice in enumerate(response.choices)]
        pieces = [
            self._api.chunk(response, [self._api.last(self._request, response, index, rest)])
            for index, rest in enumerate(rests)
        ]
        if self._request.usage_in_stream:
            pieces.append(self._api.chunk(response, [], usage=usage(response)))
        return b"".join([*pieces, DONE])


def _prompt(prompt: str | list[str | int | list[int]]) -> tuple[str | None, list[int] | None]:
    if isinstance(prompt, str):
        return prompt, None
    tokens = [each for each in prompt if isinstance(each, int)]
    if prompt and len(tokens) == len(prompt):
        return None, tokens
    if len(prompt) != 1:
        raise invalid("only one prompt per request is supported", "prompt")
    only = prompt[0]
    return (only, None) if isinstance(only, str) else (None, only if isinstance(only, list) else [only])
