"""A model that only scores: the logprobs of the trainer's own forward pass, however requests are put together."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import make_sample, save_tiny

from rollart.core.column import Column
from rollart.core.teaching import ScoreRequest
from rollart.training.policy import PolicyModel
from rollart.training.scorer import Scorer


@pytest.fixture
def scorer(tmp_path: Path) -> Scorer:
    return Scorer(PolicyModel(save_tiny(tmp_path / "model"), trained=False), torch.device("cpu"))


def requests() -> list[ScoreRequest]:
    draw = random.Random(0)
    made = [make_sample(0.0, draw, length=length) for length in (12, 40, 25)]
    return [ScoreRequest(one.tokens, Column.flags(one.mask), 0.7) for one in made]


def test_requests_that_wait_are_scored_together_as_each_would_be_alone(scorer: Scorer) -> None:
    passes: list[int] = []
    score_all = scorer.score_all

    def counted(several: list[ScoreRequest]) -> object:
        passes.append(len(several))
        return score_all(several)

    scorer.score_all = counted  # type: ignore[method-assign, assignment]

    async def at_once() -> list[object]:
        return list(await asyncio.gather(*map(scorer.score, requests())))

    found = asyncio.run(at_once())
    assert passes == [3]
    for request, teaching in zip(requests(), found, strict=True):
        (alone,) = score_all([request])
        assert len(alone.logprobs) == int(request.mask.array.sum())
        np.testing.assert_allclose(teaching.logprobs.array, alone.logprobs.array, atol=1e-5)  # type: ignore[attr-defined]


def test_a_request_that_cannot_be_scored_fails_alone(scorer: Scorer) -> None:
    async def both() -> list[object]:
        wrong = ScoreRequest(Column.ints([10**6, 1]), Column.flags([0, 1]))
        refused = await asyncio.gather(scorer.score(wrong), return_exceptions=True)
        return [*refused, await scorer.score(requests()[0])]

    first, second = asyncio.run(both())
    assert isinstance(first, Exception) and not isinstance(second, Exception)
