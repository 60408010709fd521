import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from rollart.training.norms import rms_norm, use_fast_norms


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
