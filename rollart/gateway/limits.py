"""Limits of the gateway: for every HTTP client, and for the holder of one key."""

from msgspec import Struct

from rollart.core.types import Sampling
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import CompletionRequest

STOPS, STOP_CHARS = 64, 1000
GREEDY = 1e-3  # a temperature below this means the likeliest token


class GatewayLimits(Struct, frozen=True):
    """`requests` and `connections` at the same time, bytes of one body and of all that are held, and timeouts: to show
    a key (`head_s`), to read a request, to generate a response, for the client to read what was sent, and for an idle
    connection."""

    body_bytes: int = 32 << 20
    buffer_bytes: int = 512 << 20
    requests: int = 4096
    connections: int = 8192
    head_s: float = 10.0
    read_s: float = 30.0
    response_s: float = 600.0
    send_s: float = 60.0
    idle_s: float = 75.0


class EpisodeLimits(Struct, frozen=True):
    """What the holder of a key may do. `fixed`: sampling parameters of the client are ignored, because the trainer
    assumes `sampling`. `max_calls` is the number of completions in all, if that is limited, `max_parallel` that of
    concurrent requests. Without `record` no turns are captured."""

    id: str
    task: str
    seed: int
    sampling: Sampling
    max_context: int
    max_calls: int | None = None
    max_parallel: int = 64
    fixed: bool = True
    record: bool = True

    def sampling_for(self, request: CompletionRequest, stop: tuple[int, ...], context: int) -> Sampling:
        """What the client asks for, within the limits, after `context` tokens. Raises ApiError if there is no room."""
        own, room = self.sampling, self.max_context - context
        if context == 0:
            raise invalid("the prompt has no tokens", "prompt")
        if room < 1:
            raise self.too_long(f"{context} tokens")
        long = any(len(text) > STOP_CHARS for text in request.stop)
        if long or max(len(request.stop), len(request.stop_tokens)) > STOPS:  # each is searched for in every token
            raise invalid(f"at most {STOPS} stop strings or tokens, of at most {STOP_CHARS} characters", "stop")
        max_tokens, stop = request.max_tokens or own.max_tokens, (*stop, *request.stop_tokens)
        if self.fixed:
            max_tokens = min(max_tokens, own.max_tokens, room)
            return Sampling(
                temperature=own.temperature,
                top_p=own.top_p,
                top_k=own.top_k,
                max_tokens=max_tokens,
                stop=stop,
                seed=request.seed,
            )
        temperature = own.temperature if request.temperature is None else request.temperature
        top_k = own.top_k if request.top_k is None else max(0, request.top_k)
        if temperature < GREEDY:
            temperature, top_k = 1.0, 1
        top_p = own.top_p if request.top_p is None else request.top_p
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=min(max_tokens, room),
            stop=stop,
            seed=request.seed,
        )

    def too_long(self, size: str) -> ApiError:
        return invalid(
            f"the context has {size}, and the model may have {self.max_context} tokens in all",
            code="context_length_exceeded",
        )
