"""A model that only scores: the logprobs of the trainer's own forward pass, however requests are put together."""

import asyncio
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import make_sample, save_tiny
from transformers import AutoModelForCausalLM

from rollart.core.column import Column
from rollart.core.teaching import ScoreRequest
from rollart.training.scorer import Scorer, TeacherModel


@pytest.fixture
def scorer(tmp_path: Path) -> Scorer:
    return Scorer(TeacherModel(save_tiny(tmp_path / "model")), torch.device("cpu"))


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


def test_the_likeliest_tokens_are_those_of_the_whole_distribution(scorer: Scorer, tmp_path: Path) -> None:
    asked = zip(requests(), (2, 5, 0), strict=True)
    few, many, none = (msgspec.structs.replace(request, count=count) for request, count in asked)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for request, teaching in zip((few, many, none), scorer.score_all([few, many, none]), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(request.tokens.array.tolist())[None]).logits[0] / request.temperature
        scored = np.flatnonzero(request.mask.array)
        logprobs = logits.log_softmax(-1)[scored - 1]
        chosen = logprobs[range(len(scored)), request.tokens.array[scored].tolist()]
        np.testing.assert_allclose(teaching.logprobs.array, chosen.numpy(), atol=1e-5)
        assert teaching.count == request.count
        if not request.count:
            assert teaching.top_ids is None and teaching.top_logprobs is None
            continue
        assert teaching.top_ids is not None and teaching.top_logprobs is not None
        values, ids = logprobs.topk(request.count)
        np.testing.assert_array_equal(teaching.top_ids.array, ids.numpy().ravel())
        np.testing.assert_allclose(teaching.top_logprobs.array, values.numpy().ravel(), atol=1e-5)


def test_a_request_without_tokens_to_score_has_no_likeliest_tokens(scorer: Scorer) -> None:
    (teaching,) = scorer.score_all([ScoreRequest(Column.ints([1, 2]), Column.flags([0, 0]), count=3)])
    assert len(teaching.logprobs) == 0 and teaching.top_ids is not None and len(teaching.top_ids) == 0
