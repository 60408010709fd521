"""The nouns of the gateway: a request and its answer, whichever API they came by, and what an episode is allowed.

Nothing here knows HTTP or a model. What crosses the wire to the controller is plain for msgspec.
"""

from typing import Any, Literal

from msgspec import Struct

from rollart.core.types import Sampling


class ToolCall(Struct, frozen=True):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str
    id: str = ""


class ChatMessage(Struct, frozen=True):
    """One message. `answers` is the id of the call that a tool's message is the result of."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""


class Tool(Struct, frozen=True):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class CompletionRequest(Struct, kw_only=True):
    """What a client wants. The context is `messages`, or `text` as it stands, or `tokens`.

    `force`: the model must call this tool, or any if it is empty; `calls`: what looks like a call is one. `prefix` is
    how the answer has to begin.
    """

    model: str = ""
    messages: tuple[ChatMessage, ...] = ()
    text: str | None = None
    tokens: list[int] | None = None
    tools: tuple[Tool, ...] = ()
    force: str | None = None
    calls: bool = True
    prefix: str = ""
    n: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    logprobs: bool = False
    token_ids: bool = False
    stream: bool = False
    usage_in_stream: bool = False


class CompletionChoice(Struct):
    """One completion. `stopped_by` is the client's stop string that ended it, if one did."""

    text: str
    calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length"]
    stopped_by: str | None
    tokens: list[int]
    logprobs: list[float]


class CompletionResponse(Struct):
    """`cached` of the `prompt` tokens needed no prefill, for the first choice. While it is being made it has no choices
    and nothing is known to be cached."""

    id: str
    created: int
    model: str
    prompt: list[int]
    choices: list[CompletionChoice] = []
    cached: int = 0

    @property
    def made(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)


class EpisodeLimits(Struct, frozen=True):
    """What the holder of a key may do. `fixed`: `sampling` decides how tokens are drawn, not the client, because what
    is trained must have been sampled as the trainer thinks. `calls` is the number of completions in all, `parallel` at
    the same time. Without `record` nothing is kept to be trained."""

    id: str
    task: str
    seed: int
    sampling: Sampling
    max_context: int
    calls: int = 1_000_000
    parallel: int = 64
    fixed: bool = True
    record: bool = True
