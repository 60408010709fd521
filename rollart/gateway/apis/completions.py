"""OpenAI completions: POST /v1/completions. The prompt is text or tokens, as it stands."""

from collections.abc import Sequence
from typing import Any

from msgspec.json import Decoder

from rollart.gateway.apis.base import decode_body
from rollart.gateway.apis.openai import ChunkWriter, OpenAIApi, StreamFields, head, usage
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
        choices = [self.choice(request, response, number) for number in range(len(response.choices))]
        return {**head(response, "cmpl", "text_completion"), "choices": choices, "usage": usage(response)}

    def choice(self, request: CompletionRequest, response: CompletionResponse, number: int) -> dict[str, Any]:
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

    def writer(self, request: CompletionRequest) -> "_Writer":
        return _Writer(self, request)


class _Writer(ChunkWriter):
    def __init__(self, api: Completions, request: CompletionRequest) -> None:
        super().__init__(request, "cmpl", "text_completion")
        self._api = api

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        return self.chunk(response, [{"index": index, "text": piece, "finish_reason": None}])

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        choices = [self._api.choice(self._request, response, index) for index in range(len(sent))]
        rests = [{**choice, "text": choice["text"][start:]} for choice, start in zip(choices, sent, strict=True)]
        return b"".join(self.chunk(response, [rest]) for rest in rests) + self.last(response)


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
