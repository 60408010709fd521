"""What a teacher gives a sample reaches the loss, and a position that is predicted several times counts once."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, make_sample, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.teaching import Teaching
from rollart.core.types import Batch, SampleGroup
from rollart.training.packing import pack
from rollart.training.trainer import Trainer

COUNT = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def taught(step: int) -> Batch:
    """Samples whose teacher is sure of token 5 everywhere."""
    draw = random.Random(step)
    samples = []
    for number in range(4):
        sample = make_sample(0.0, draw, length=40)
        ids = np.tile([5, 6, 7], sample.actions)
        logprobs = np.tile(np.log([0.9, 0.05, 0.03]), sample.actions)
        teacher = Teaching(
            logprobs=Column.floats(np.full(sample.actions, -2.0)),
            count=COUNT,
            top_ids=Column.ints(ids),
            top_logprobs=Column.floats(logprobs),
        )
        samples.append(replace(sample, id=str(number), teacher=teacher))
    return Batch(step, (SampleGroup("g", "t", tuple(samples)),))


@pytest.mark.parametrize("loss", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_the_policy_learns_what_its_teacher_is_sure_of(folder: Path, loss: str) -> None:
    algorithm = AlgorithmConfig.model_validate({"loss": loss, "correction": [], "evidence_power": 0})
    trainer = Trainer(folder, TrainingConfig(lr=1e-2, lr_warmup=0, algorithm=algorithm))
    losses = [trainer.step(taught(step)).values["loss"] for step in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_position_that_is_predicted_several_times_has_the_same_gradient(folder: Path) -> None:
    policy = Trainer(folder, TrainingConfig()).learner.policy
    draw = random.Random(0)
    tokens = [draw.randrange(VOCABULARY) for _ in range(40)]
    mask = [0] * 30 + [1] * 10
    gradients = []
    for repeats in (1, 4):
        packed = pack([tokens], [mask])
        wide = type(packed)(
            **{name: getattr(packed, name) for name in packed.__struct_fields__ if name not in ("predict", "targets")},
            predict=packed.predict.repeat_interleave(repeats),
            targets=packed.targets.repeat_interleave(repeats),
        )
        (policy.logprobs(wide)[0].sum() / repeats).backward()
        parameters = policy.parameters().values()
        gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
        for parameter in parameters:
            parameter.grad = None
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
