"""A request inside a modelled engine, from its arrival to its answer."""

import asyncio
from typing import Any

from msgspec import Struct

from rollart.core.run_length import RunLength, run_of
from rollart.core.types import Completion, Finish, GenerationRequest


class Sequence(Struct, eq=False):
    """`length` tokens of context, `new` of them to prefill, `wanted` to answer with; `made` and `spans` before it had
    to start again. `base` is its context when it joined the decoding ones at step `joined`."""

    request: GenerationRequest
    answer: asyncio.Future[Completion]
    length: int
    new: int
    wanted: int
    finish: Finish
    began: float
    cached: int = 0
    fetched: int = 0
    admitted: float = -1.0
    first: float = -1.0
    made: float = 0.0
    base: float = 0.0
    joined: float = 0.0
    order: int = 0
    decoding: bool = False
    gone: bool = False
    spans: list[tuple[int, int]] = []

    def completed(self, now: float) -> Completion:
        tokens: Any = run_of(0, self.wanted)
        versions: Any = self._versions()
        return Completion(
            tokens,
            tokens,
            versions,
            self.finish,
            prompt=self.length,
            cached=self.cached,
            fetched=self.fetched,
            queue_s=self.admitted - self.began,
            prefill_s=self.first - self.admitted,
            decode_s=now - self.first,
        )

    def _versions(self) -> RunLength:
        """Joined where they are the same, and exactly as many as there are tokens: parts of steps were rounded."""
        counts: dict[int, int] = {}
        for version, count in self.spans:
            counts[version] = counts.get(version, 0) + count
        last = self.spans[-1][0] if self.spans else 0
        if len(counts) == 1:
            return run_of(last, self.wanted)
        counts[last] = counts.get(last, 0) + self.wanted - sum(counts.values())
        return RunLength(tuple((version, count) for version, count in counts.items() if count > 0), self.wanted)
