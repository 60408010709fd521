"""How the tokens of a request are drawn: what the client asks for, within what its terms allow."""

from rollart.core.types import Sampling
from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.messages import CompletionRequest, EpisodeLimits

GREEDY = 1e-3  # a temperature below this means the likeliest token


def sampling_of(ask: CompletionRequest, terms: EpisodeLimits, stop: tuple[int, ...], context: int) -> Sampling:
    """For a context of so many tokens. Raises ApiError if there is no room for an answer."""
    own, room = terms.sampling, terms.max_context - context
    if context == 0:
        raise invalid("the prompt has no tokens", "prompt")
    if room < 1:
        raise too_long(f"{context} tokens", terms)
    asked, stop = ask.max_tokens or own.max_tokens, (*stop, *ask.stop_tokens)
    if terms.fixed:
        most = min(asked, own.max_tokens, room)
        return Sampling(own.temperature, own.top_p, own.top_k, most, stop, ask.seed)
    temperature = own.temperature if ask.temperature is None else ask.temperature
    top_k = own.top_k if ask.top_k is None else max(0, ask.top_k)
    if temperature < GREEDY:
        temperature, top_k = 1.0, 1
    top_p = own.top_p if ask.top_p is None else ask.top_p
    return Sampling(temperature, top_p, top_k, min(asked, room), stop, ask.seed)


def too_long(what: str, terms: EpisodeLimits) -> ApiError:
    return invalid(
        f"the context has {what}, and the model may have {terms.max_context} tokens in all",
        code="context_length_exceeded",
    )
