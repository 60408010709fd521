"""A request inside a modelled engine, from its arrival to its answer."""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass, field
from typing import Any, cast

from rollart.compact import Runs, run_of
from rollart.types import Completion, GenerationRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """`length` tokens of context, `new` of them to prefill, `wanted` to answer with; `made` and `spans` before it had
    to start again. `base` is its context when it joined the decoding ones at step `joined`."""

    request: GenerationRequest
    answer: "asyncio.Future[Completion]"
    length: int
    new: int
    wanted: int
    finish: str
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
    spans: list[tuple[int, int]] = field(default_factory=list)

    def note_versions(self, swaps: Sequenced[tuple[float, int]], steps: float) -> None:
        """Which versions made its tokens since it joined, up to step `steps`; `swaps` are (step, version)."""
        joined = self.joined
        if swaps[-1][0] <= joined:
            self.spans.append((swaps[-1][1], round(steps - joined)))
            return
        index = bisect_right(swaps, joined, key=lambda swap: swap[0]) - 1
        while joined < steps:
            until = swaps[index + 1][0] if index + 1 < len(swaps) else steps
            self.spans.append((swaps[index][1], round(until - joined)))
            joined, index = until, index + 1

    def completed(self, now: float) -> Completion:
        tokens = cast(Any, run_of(0, self.wanted))
        return Completion(
            tokens,
            tokens,
            cast(Any, self._versions()),
            cast(Any, self.finish),
            prompt=self.length,
            cached=self.cached,
            fetched=self.fetched,
            queue_s=self.admitted - self.began,
            prefill_s=self.first - self.admitted,
            decode_s=now - self.first,
        )

    def _versions(self) -> Runs:
        """Joined where they are the same, and exactly as many as there are tokens: parts of steps were rounded."""
        counts: dict[int, int] = {}
        for version, count in self.spans:
            counts[version] = counts.get(version, 0) + count
        last = self.spans[-1][0] if self.spans else 0
        if len(counts) == 1:
            return run_of(last, self.wanted)
        counts[last] = counts.get(last, 0) + self.wanted - sum(counts.values())
        return Runs(tuple((version, count) for version, count in counts.items() if count > 0), self.wanted)
