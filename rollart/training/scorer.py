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
from torch import Tensor

from rollart.core.column import Column
from rollart.core.teaching import ScoreRequest, Teaching
from rollart.launch.rpc import Handler
from rollart.launch.service import main, torch_device
from rollart.training.packing import Packed, pack
from rollart.training.policy import PolicyModel
from rollart.training.ranks import Ranks
from rollart.training.score import likeliest

PACK_TOKENS = 8192


class TeacherModel(PolicyModel):
    """Frozen. It also finds the likeliest tokens."""

    def __init__(self, folder: Path, ranks: Ranks | None = None) -> None:
        self._count = 0
        super().__init__(folder, ranks, trained=False)

    def teachings(self, packed: Packed, count: int) -> tuple[Tensor, ...]:
        """Logprobs of the scored tokens; with `count`, also ids and logprobs of the likeliest ones there."""
        self._count = count
        found: tuple[Tensor, ...] = self.logprobs(packed)
        return found if count else found[:1]

    def _outputs(self, model: Any, hidden: Tensor, targets: Tensor, temperature: Tensor | None) -> tuple[Tensor, ...]:
        if not self._count:
            return super()._outputs(model, hidden, targets, temperature)
        head = model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return likeliest(hidden, head.weight, targets, self._count, bias=bias, temperature=temperature)


class Scorer:
    def __init__(self, policy: TeacherModel, device: torch.device) -> None:
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
        found = self._policy.teachings(packed, max(request.count for request in requests))
        sizes = [int(mask.sum()) for mask in masks]
        columns = zip(*(torch.split(column.cpu(), sizes) for column in found), strict=True)
        return [_teaching(request.count, *parts) for request, parts in zip(requests, columns, strict=True)]


def _teaching(count: int, logprobs: Tensor, ids: Tensor | None = None, top: Tensor | None = None) -> Teaching:
    if not count or ids is None or top is None:
        return Teaching(Column.floats(logprobs.numpy()))
    ids, top = ids[:, :count], top[:, :count]
    columns = Column.ints(ids.numpy().ravel()), Column.floats(top.numpy().ravel())
    return Teaching(Column.floats(logprobs.numpy()), ids.shape[1], *columns)


@asynccontextmanager
async def build(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Handler]]:
    torch.set_num_threads(spec.get("threads", 1))
    ranks = Ranks.single(torch_device("auto", spec))
    scorer = Scorer(TeacherModel(Path(spec["model"]), ranks), ranks.device)
    yield {"score": scorer.score}


if __name__ == "__main__":
    main(build)
