"""Tokens in, tokens out: POST /inference/v1/generate, as vLLM offers it and training clients speak it."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.gateway.apis.base import DONE, decode_body, event
from rollart.gateway.apis.openai import OpenAIApi, SamplingFields, usage
from rollart.gateway.errors import invalid
from rollart.gateway.messages import CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.session import EpisodeSession


class _Sampling(SamplingFields):
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None


class _Request(Struct):
    token_ids: list[int]
    sampling_params: _Sampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None


class Generate(OpenAIApi):
    """A stream is one event: clients that ask for tokens need their logprobs, which come with the last."""

    streams_text = False
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, session: EpisodeSession) -> CompletionRequest:
        request = decode_body(self._decoder, body)
        params = request.sampling_params
        if not request.token_ids:
            raise invalid("token_ids is empty", "token_ids")
        return CompletionRequest(
            model=request.model or "",
            tokens=request.token_ids,
            **params.sampling(),
            stop_tokens=tuple(params.stop_token_ids or ()),
            logprobs=params.logprobs is not None,
            stream=bool(request.stream),
        )

    def response_body(self, request: CompletionRequest, response: CompletionResponse) -> Any:
        choices = [self._choice(request, number, choice) for number, choice in enumerate(response.choices)]
        return {"request_id": response.id, "choices": choices, "prompt_logprobs": None, "usage": usage(response)}

    def _choice(self, request: CompletionRequest, number: int, choice: CompletionChoice) -> dict[str, Any]:
        return {
            "index": number,
            "token_ids": choice.tokens,
            "logprobs": self.logprobs(choice) if request.logprobs else None,
            "finish_reason": choice.finish,
        }

    def piece(self, token: int, logprob: float) -> dict[str, Any]:
        """Tokens are named by their numbers: several may have the same text."""
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}

    def writer(self, request: CompletionRequest) -> "_Writer":
        return _Writer(self, request)


class _Writer:
    def __init__(self, api: Generate, request: CompletionRequest) -> None:
        self._api, self._request = api, request

    def text(self, response: CompletionResponse, index: int, piece: str) -> bytes:
        raise AssertionError("this API streams no text")

    def end(self, response: CompletionResponse, sent: Sequence[int]) -> bytes:
        return event(self._api.response_body(self._request, response)) + DONE
