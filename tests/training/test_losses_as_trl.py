"""Losses and gradients of TRL's own code, in its environment, on the same tensors."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_more_losses import make

from rollart.training.losses import LOSSES, LossInputs, policy_loss, weighted_kl

pytestmark = pytest.mark.slow

PYTHON = Path(__file__).parents[2] / ".venv-trl" / "bin" / "python"
SCRIPT = Path(__file__).with_name("trl_losses.py")
CASES = {
    "ppo": {"type": "dapo"},
    "gspo": {"type": "grpo", "level": "sequence"},
    "cispo": {"type": "cispo"},
    "sapo": {"type": "sapo"},
    "kl": {"type": "dapo", "beta": 0.1},
    "forward_kl": {"mix": 0.0},
    "reverse_kl": {"mix": 1.0},
    "jensen_shannon": {"mix": 0.5},
}


@pytest.fixture(scope="module")
def theirs() -> dict[str, tuple[float, list[float]]]:
    if not PYTHON.exists():
        pytest.skip("TRL is not installed; `make trl` makes its environment")
    given = make()
    names = ("logprobs", "old_logprobs", "advantages", "reference_logprobs")
    values = {name: getattr(given, name).tolist() for name in names}
    values |= {"student": logits(1).flatten().tolist(), "teacher": logits(2).flatten().tolist()}
    done = subprocess.run(
        [PYTHON, SCRIPT],
        input=json.dumps({"given": values, "cases": list(CASES.values())}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def logits(seed: int) -> torch.Tensor:
    return torch.randn(24, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ours(name: str) -> tuple[float, list[float]]:
    given = make(name=name)
    if "mix" in CASES[name]:
        student = logits(1).requires_grad_()
        given = LossInputs(
            given.logprobs,
            given.old_logprobs,
            given.engine_logprobs,
            given.advantages,
            given.sequences,
            given.config,
            teacher_logprobs=given.teacher_logprobs,
            top_logprobs=student.log_softmax(-1)[:, :3],
            teacher_top_logprobs=logits(2).log_softmax(-1)[:, :3],
        )
        loss = policy_loss(LOSSES.find(name), given).loss.mean()
        return loss.item(), torch.autograd.grad(loss, student)[0].flatten().tolist()
    if name == "cispo":  # TRL's has no lower bound
        given = replace(given, config=given.config.model_copy(update={"clip_low": 1.0}))
    loss = policy_loss(LOSSES.find("ppo" if name == "kl" else name), given).loss
    if name == "kl":
        assert given.reference_logprobs is not None
        loss = loss + 0.1 * weighted_kl(given, given.reference_logprobs, torch.ones(24))
    total = loss.mean()
    return total.item(), torch.autograd.grad(total, given.logprobs)[0].tolist()


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str, theirs: dict[str, tuple[float, list[float]]]) -> None:
    value, gradient = ours(name)
    assert value == pytest.approx(theirs[name][0], abs=1e-6)
    assert gradient == pytest.approx(theirs[name][1], abs=1e-6)
