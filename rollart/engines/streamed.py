"""An answer that is told of while it is made, as engines and their clients speak of it."""

from dataclasses import dataclass

from rollart.core.types import GenerationRequest


@dataclass(frozen=True, slots=True)
class Streamed:
    """A request whose tokens are to be told `every` so many."""

    request: GenerationRequest
    every: int
