"""OpenAI completions: POST /v1/completions. The prompt is text or tokens, as it stands."""

from collections.abc import Sequence
from typing import Any

from msgspec.json import Decoder

from rollart.gateway.apis.base import DONE, Writer, event, read
from rollart.gateway.apis.openai import OpenAI, Streamed, usage
from rollart.gateway.errors import invalid
from rollart.gateway.messages import CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.tenant import Tenant


class _Request(Streamed, kw_only=True):
    prompt: str | list[str | int | list[int]]
    model: str = ""
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    return_token_ids: bool | None = None


class Completions(OpenAI):
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, tenant: Tenant) -> CompletionRequest:
        request = read(self._decoder, body)
        for name in ("echo", "suffix"):
            if getattr(request, name):
                raise invalid(f"{name} is not offered here", name)
        text, tokens = _prompt(request.prompt)
        return CompletionRequest(
            model=request.model,
            text=text,
            tokens=tokens,
            **request.drawing(),
            logprobs=request.logprobs is not None,
            token_ids=bool(request.return_token_ids),
            **request.streaming(),
        )

    def whole(self, ask: CompletionRequest, answer: CompletionResponse) -> Any:
        choices = [self._choice(ask, answer, number) for number in range(len(answer.choices))]
        return {**self._head(answer), "choices": choices, "usage": usage(answer)}

    def _head(self, answer: CompletionResponse) -> dict[str, Any]:
        return {
            "id": f"cmpl-{answer.id}",
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
        }

    def _choice(self, ask: CompletionRequest, answer: CompletionResponse, number: int) -> dict[str, Any]:
        choice = answer.choices[number]
        said: dict[str, Any] = {
            "index": number,
            "text": choice.text,
            "logprobs": self._listed(choice) if ask.logprobs else None,
            "finish_reason": choice.finish,
        }
        if ask.token_ids:
            said |= {"token_ids": choice.tokens, "prompt_token_ids": answer.prompt}
        return said

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

    def writer(self, ask: CompletionRequest) -> Writer:
        return _Writer(self, ask)

    def chunk(self, answer: CompletionResponse, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event({**self._head(answer), "choices": choices, **more})

    def last(self, ask: CompletionRequest, answer: CompletionResponse, index: int, rest: str) -> dict[str, Any]:
        return {**self._choice(ask, answer, index), "text": rest}


class _Writer:
    def __init__(self, api: Completions, ask: CompletionRequest) -> None:
        self._api, self._ask = api, ask

    def text(self, answer: CompletionResponse, index: int, piece: str) -> bytes:
        return self._api.chunk(answer, [{"index": index, "text": piece, "finish_reason": None}])

    def end(self, answer: CompletionResponse, shown: Sequence[int]) -> bytes:
        rests = [choice.text[shown[index] :] for index, choice in enumerate(answer.choices)]
        pieces = [
            self._api.chunk(answer, [self._api.last(self._ask, answer, index, rest)])
            for index, rest in enumerate(rests)
        ]
        if self._ask.usage_in_stream:
            pieces.append(self._api.chunk(answer, [], usage=usage(answer)))
        return b"".join([*pieces, DONE])


def _prompt(prompt: str | list[str | int | list[int]]) -> tuple[str | None, list[int] | None]:
    if isinstance(prompt, str):
        return prompt, None
    tokens = [each for each in prompt if isinstance(each, int)]
    if prompt and len(tokens) == len(prompt):
        return None, tokens
    if len(prompt) != 1:
        raise invalid("one prompt per request, please", "prompt")
    only = prompt[0]
    return (only, None) if isinstance(only, str) else (None, only if isinstance(only, list) else [only])
