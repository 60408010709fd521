from pathlib import Path
from typing import Literal

import pytest
import torch
from tiny_models import save_tiny, tiny_model
from torch import Tensor, nn

from rollart.config import TrainingConfig
from rollart.training import policy
from rollart.training.norms import rms_norm, use_fast_norms
from rollart.training.packing import pack
from rollart.training.policy import PolicyModel


class PlusOneNorm(nn.Module):
    """Gemma's kind: the weight is an offset from one."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.variance_epsilon = 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


@pytest.mark.parametrize("shape", [(1, 7, 32), (1, 5, 4, 32)])
def test_the_fast_norm_and_its_gradients_are_those_of_the_plain_one(shape: tuple[int, ...]) -> None:
    plain = tiny_model().model.norm
    plain.weight.data.uniform_(0.5, 2.0)
    results = []
    for norm in (plain, lambda states: rms_norm(plain, states)):
        plain.weight.grad = None
        states = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        out = norm(states)
        (out * torch.linspace(-1, 1, out.numel()).view(shape)).sum().backward()
        results.append((out, states.grad, plain.weight.grad))
    for fast, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(fast, expected, atol=1e-5, rtol=1e-5)


def test_every_norm_of_a_qwen3_is_replaced() -> None:
    assert use_fast_norms(tiny_model(num_hidden_layers=2)) == 2 * 4 + 1


def test_a_norm_that_computes_something_else_is_left_alone() -> None:
    norm = PlusOneNorm()
    assert use_fast_norms(norm) == 0
    assert "forward" not in vars(norm)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_a_cpu_in_bfloat16_pads_passes_which_changes_nothing(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow without instructions for it, but the same."""
    monkeypatch.setattr(policy, "multiplies_bfloat16", lambda: True)
    folder = save_tiny(tmp_path, architecture)
    rows = [[3, 5, 7, 9, *(n % 11 for n in range(length))] for length in (20, 3, 20, 41)]
    packed = pack(rows, [[0] * 4 + [1] * (len(row) - 4) for row in rows], share=architecture != "qwen3_moe")

    def run(multiple: int, dtype: Literal["float32", "bfloat16"]) -> tuple[Tensor, dict[str, Tensor]]:
        monkeypatch.setattr(policy, "MIN_PADDING", multiple)
        model = PolicyModel(folder, config=TrainingConfig(dtype=dtype, pack_tokens=16))
        logprobs, _ = model.logprobs(packed)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        assert all(weight.dtype == torch.float32 for weight in model.parameters().values())
        return logprobs.detach(), {
            name: weight.grad for name, weight in model.parameters().items() if weight.grad is not None
        }

    (exact, slopes), (plain, plain_slopes), (padded, padded_slopes) = (
        run(*how) for how in ((1, "float32"), (1, "bfloat16"), (64, "bfloat16"))
    )
    torch.testing.assert_close(padded, plain)
    torch.testing.assert_close(padded_slopes, plain_slopes, rtol=1e-3, atol=1e-3)
    assert 1e-5 < (plain - exact).abs().mean() < 0.05
    assert slopes.keys() == plain_slopes.keys()


def test_a_cpu_without_instructions_for_bfloat16_computes_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "multiplies_bfloat16", lambda: False)
    folder, packed = save_tiny(tmp_path), pack([[1, 2, 3]], [[0, 1, 1]])
    exact, asked = (
        PolicyModel(folder, config=TrainingConfig(dtype=each)).logprobs(packed)[0] for each in ("float32", "bfloat16")
    )
    assert torch.equal(exact, asked)
