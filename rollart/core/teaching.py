"""What a teacher is asked, and what it gives."""

from msgspec import Struct

from rollart.core.column import Column


class ScoreRequest(Struct, frozen=True):
    """The tokens of a sample; those where `mask` is 1 are scored, as sampled at `temperature`. `count`: of how many of
    the likeliest tokens there the logprobs are wanted too."""

    tokens: Column
    mask: Column
    temperature: float = 1.0
    count: int = 0


class Teaching(Struct, frozen=True, gc=False):
    """What a teacher gives the action tokens of a sample: the logprob of each, and of its own `count` likeliest tokens
    there (`top_ids`, `top_logprobs`: one row after the other)."""

    logprobs: Column
    count: int = 0
    top_ids: Column | None = None
    top_logprobs: Column | None = None
