"""A model that only scores: `python -m rollart.training.scorer`, spec on stdin: `model` (a folder), `threads`.

For teachers. Requests that wait are scored together, in one packed forward pass as the trainer's are. Invariants:
passes run in one thread, one at a time; a request belongs to one pass; a pass that fails fails its own requests only.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from rollart.core.column import Column
from rollart.core.teaching import ScoreRequest, Teaching
from rollart.launch.rpc import Handler
from rollart.launch.service import main, torch_device
from rollart.training.packing import pack
from rollart.training.policy import PolicyModel
from rollart.training.ranks import Ranks

PACK_TOKENS = 8192


class Scorer:
    def __init__(self, policy: PolicyModel, device: torch.device) -> None:
        self._policy, self._device = policy, device
        self._waiting: deque[tuple[ScoreRequest, asyncio.Future[Teaching]]] = deque()
        self._passing: asyncio.Task[None] | None = None

    async def score(self, request: ScoreRequest) -> Teaching:
        future: asyncio.Future[Teaching] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._passing is None or self._passing.done():
            self._passing = asyncio.create_task(self._passes())
        return await future

    async def _passes(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft()]
            tokens = len(taken[0][0].tokens)
            while self._waiting and tokens + len(self._waiting[0][0].tokens) <= PACK_TOKENS:
                taken.append(self._waiting.popleft())
                tokens += len(taken[-1][0].tokens)
            try:
                found = await asyncio.to_thread(self.score_all, [request for request, _ in taken])
            except Exception as error:  # the caller of each request gets it
                for _, future in taken:
                    future.set_exception(error)
                continue
            for (_, future), teaching in zip(taken, found, strict=True):
                if not future.done():
                    future.set_result(teaching)

    @torch.no_grad()
    def score_all(self, requests: list[ScoreRequest]) -> list[Teaching]:
        """In one forward pass."""
        masks = [request.mask.array for request in requests]
        with self._device:
            packed = pack([r.tokens.array for r in requests], masks, [r.temperature for r in requests])
        logprobs = self._policy.logprobs(packed)[0].cpu()
        parts = torch.split(logprobs, [int(mask.sum()) for mask in masks])
        return [Teaching(Column.floats(part.numpy())) for part in parts]


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    torch.set_num_threads(spec.get("threads", 1))
    ranks = Ranks.single(torch_device("auto", spec))
    scorer = Scorer(PolicyModel(Path(spec["model"]), ranks, trained=False), ranks.device)
    yield {"score": scorer.score}


if __name__ == "__main__":
    main(build)
