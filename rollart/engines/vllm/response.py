"""A completion, put together from the parts of vLLM's answer."""

import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from rollart.core.errors import EngineFailed
from rollart.core.types import Completion, Finish


class TokenLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class VersionSpan(msgspec.Struct):
    """Tokens `start` to `end` were made by the weights of that label."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class TokenUsage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: PromptDetails | None = None


class ApiError(msgspec.Struct):
    message: str = ""


class GenerateResponse(msgspec.Struct):
    """A part of a streamed answer, or all of one that is not."""

    choices: list[Choice] = []
    usage: TokenUsage | None = None
    error: ApiError | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionBuilder:
    """The first part comes with the first token, which tells when its prefill was over; vLLM does not tell how long it
    had waited before. `handed`: its KV was to be had from another server, all but that of the last token; what vLLM
    then calls cached is what the other server had in its cache."""

    def __init__(self, prompt: int, handed: bool = False) -> None:
        self._prompt, self._handed = prompt, handed
        self._began = self._first = time.perf_counter()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._taken = 0
        self._last = Choice()
        self._usage = TokenUsage()

    def add(self, part: GenerateResponse) -> None:
        if not self._tokens:
            self._first = time.perf_counter()
        for choice in part.choices:
            self._last = choice
            self._tokens += choice.token_ids or ()
            if choice.logprobs is not None:
                self._logprobs += [token.logprob for token in choice.logprobs.content or ()]
        if part.usage is not None:
            self._usage = part.usage

    @property
    def fresh(self) -> int:
        """Tokens that nobody has `taken`."""
        return len(self._tokens) - self._taken

    def taken(self) -> list[int]:
        tokens, self._taken = self._tokens[self._taken :], len(self._tokens)
        return tokens

    def completion(self) -> Completion:
        """Raises EngineFailed for an answer that cannot be trained on."""
        finish, spans = self._last.finish_reason, self._last.weight_versions
        if finish not in ("stop", "length", "abort"):
            raise EngineFailed(f"vLLM ended a request for a reason that is not known here: {finish or 'none'}")
        versions = _versions(spans or (), len(self._tokens))
        if len(self._logprobs) != len(self._tokens):
            raise EngineFailed(f"vLLM gave {len(self._logprobs)} logprobs for {len(self._tokens)} tokens")
        details = self._usage.prompt_tokens_details
        cached = min(self._prompt, (details.cached_tokens or 0) if details is not None else 0)
        return Completion(
            tokens=self._tokens,
            logprobs=self._logprobs,
            versions=versions,
            finish=cast(Finish, finish),
            prompt=self._prompt,
            cached=self._prompt - 1 if self._handed else cached,
            fetched=self._prompt - 1 if self._handed else 0,
            prefill_s=self._first - self._began,
            decode_s=time.perf_counter() - self._first,
        )


def _versions(spans: Sequence[VersionSpan], tokens: int) -> list[int]:
    try:
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    except ValueError:
        raise EngineFailed(f"vLLM's weights have the label {spans[-1].version!r}, which is no version") from None
    if len(versions) != tokens:
        raise EngineFailed(
            f"vLLM said of {len(versions)} of {tokens} tokens which weights made them; it may be too old"
        )
    return versions
