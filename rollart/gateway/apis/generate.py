"""Tokens in, tokens out: POST /inference/v1/generate, as vLLM offers it and training clients speak it."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

from rollart.gateway.apis.base import DONE, Writer, event, read
from rollart.gateway.apis.openai import Drawn, OpenAI, usage
from rollart.gateway.errors import invalid
from rollart.gateway.messages import CompletionChoice, CompletionRequest, CompletionResponse
from rollart.gateway.tenant import Tenant


class _Sampling(Drawn):
    stop_token_ids: list[int] | None = None
    logprobs: int | None = None


class _Request(Struct):
    token_ids: list[int]
    sampling_params: _Sampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None


class Generate(OpenAI):
    """A stream is one event: whoever asks for tokens wants their logprobs, which come with the last."""

    speaks = False
    _decoder = Decoder(_Request)

    def parse(self, body: bytes, tenant: Tenant) -> CompletionRequest:
        request = read(self._decoder, body)
        asked = request.sampling_params
        if not request.token_ids:
            raise invalid("token_ids is empty", "token_ids")
        return CompletionRequest(
            model=request.model or "",
            tokens=request.token_ids,
            **asked.drawing(),
            stop_tokens=tuple(asked.stop_token_ids or ()),
            logprobs=asked.logprobs is not None,
            stream=bool(request.stream),
        )

    def whole(self, ask: CompletionRequest, answer: CompletionResponse) -> Any:
        choices = [self._choice(ask, number, choice) for number, choice in enumerate(answer.choices)]
        return {"request_id": answer.id, "choices": choices, "prompt_logprobs": None, "usage": usage(answer)}

    def _choice(self, ask: CompletionRequest, number: int, choice: CompletionChoice) -> dict[str, Any]:
        return {
            "index": number,
            "token_ids": choice.tokens,
            "logprobs": self.logprobs(choice) if ask.logprobs else None,
            "finish_reason": choice.finish,
        }

    def piece(self, token: int, logprob: float) -> dict[str, Any]:
        """Tokens are named by their numbers: several may have the same text."""
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}

    def writer(self, ask: CompletionRequest) -> Writer:
        return _Writer(self, ask)


class _Writer:
    def __init__(self, api: Generate, ask: CompletionRequest) -> None:
        self._api, self._ask = api, ask

    def text(self, answer: CompletionResponse, index: int, piece: str) -> bytes:
        raise AssertionError("this API does not speak")

    def end(self, answer: CompletionResponse, shown: Sequence[int]) -> bytes:
        return event(self._api.whole(self._ask, answer)) + DONE
