"""Every loss against a slow reference in plain Python, and against values worked by hand."""

import math
import random

import pytest
import torch

from rollart.config import AlgorithmConfig
from rollart.training import losses

LOW, HIGH = 0.2, 0.28


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def evaluate(
    name: str,
    current: torch.Tensor,
    proximal: torch.Tensor,
    advantage: torch.Tensor,
    *,
    sequence: torch.Tensor | None = None,
    dual: float | None = None,
) -> losses.PolicyLoss:
    config = AlgorithmConfig(loss=name, clip_low=LOW, clip_high=HIGH, dual_clip=dual)
    sequence = torch.zeros(len(current), dtype=torch.long) if sequence is None else sequence
    inputs = losses.LossInputs(current, proximal, proximal, advantage, sequence, config)
    return losses.policy_loss(losses.LOSSES.find(name), inputs)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(ratio: float, advantage: float, dual: float | None) -> float:
    loss = max(-ratio * advantage, -clip(ratio, 1 - LOW, 1 + HIGH) * advantage)
    if dual is not None and advantage < 0:
        loss = min(loss, -dual * advantage)
    return loss


@pytest.fixture
def case() -> dict[str, list[float]]:
    draw = random.Random(3)
    current = [draw.uniform(-4, 0) for _ in range(40)]
    return {
        "current": current,
        "proximal": [value + draw.gauss(0, 0.7) for value in current],
        "advantage": [draw.gauss(0, 1) for _ in range(40)],
    }


def test_ppo_by_hand() -> None:
    current, proximal = tensor([math.log(1.5)] * 2 + [math.log(0.5)] * 2), tensor([0.0] * 4)
    result = evaluate("ppo", current, proximal, tensor([1.0, -1.0, 1.0, -1.0]))
    assert result.loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8])
    assert result.clipped.tolist() == [True, False, False, True]


def test_dual_clip_by_hand() -> None:
    result = evaluate("ppo", tensor([math.log(5.0)] * 2), tensor([0.0] * 2), tensor([-1.0, 1.0]), dual=3.0)
    assert result.loss.tolist() == pytest.approx([3.0, -1.28])
    assert result.clipped.tolist() == [True, True]


@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_is_the_plain_formula(case: dict[str, list[float]], dual: float | None) -> None:
    got = evaluate("ppo", *(tensor(case[key]) for key in case), dual=dual)
    expected = [surrogate(math.exp(c - p), a, dual) for c, p, a in zip(*case.values(), strict=True)]
    assert got.loss.tolist() == pytest.approx(expected)


def test_gspo_is_the_plain_formula(case: dict[str, list[float]]) -> None:
    sequence = [index // 7 for index in range(40)]
    advantage = [float(number) - 2.5 for number in sequence]
    got = evaluate(
        "gspo",
        tensor(case["current"]),
        tensor(case["proximal"]),
        tensor(advantage),
        sequence=torch.tensor(sequence),
    )
    for number in set(sequence):
        members = [index for index, owner in enumerate(sequence) if owner == number]
        mean = sum(case["current"][i] - case["proximal"][i] for i in members) / len(members)
        for i in members:
            assert got.loss[i].item() == pytest.approx(surrogate(math.exp(mean), advantage[i], None))


def test_gspo_by_hand() -> None:
    # ratios 2 and 0.5 multiply to 1, so the sequence is not clipped though each token would be
    got = evaluate("gspo", tensor([math.log(2), math.log(0.5)]), tensor([0.0, 0.0]), tensor([1.0, 1.0]))
    assert got.loss.tolist() == pytest.approx([-1.0, -1.0])
    assert not got.clipped.any()


def test_cispo_is_the_plain_formula_and_never_silences_a_token(case: dict[str, list[float]]) -> None:
    current = tensor(case["current"]).requires_grad_()
    got = evaluate("cispo", current, tensor(case["proximal"]), tensor(case["advantage"]))
    weights = [clip(math.exp(c - p), 1 - LOW, 1 + HIGH) for c, p, _ in zip(*case.values(), strict=True)]
    expected = [-w * a * c for w, a, c in zip(weights, case["advantage"], case["current"], strict=True)]
    assert got.loss.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(got.loss.sum(), current)
    assert gradient.tolist() == pytest.approx([-w * a for w, a in zip(weights, case["advantage"], strict=True)])


def test_clipped_tokens_of_ppo_have_no_gradient(case: dict[str, list[float]]) -> None:
    current = tensor(case["current"]).requires_grad_()
    got = evaluate("ppo", current, tensor(case["proximal"]), tensor(case["advantage"]), dual=1.5)
    (gradient,) = torch.autograd.grad(got.loss.sum(), current)
    assert got.clipped.any()
    assert torch.equal(gradient == 0, got.clipped)


def test_on_the_first_update_ppo_gspo_and_cispo_have_the_gradient_of_reinforce(case: dict[str, list[float]]) -> None:
    sequence = torch.arange(40) // 8
    advantage = (sequence - 2).double()
    gradients = []
    for name in ("reinforce", "ppo", "cispo", "gspo"):
        current = tensor(case["current"]).requires_grad_()
        result = evaluate(name, current, current.detach(), advantage, sequence=sequence)
        gradients.append(torch.autograd.grad(result.loss.sum(), current)[0])
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


def test_kl_by_hand() -> None:
    got = losses.kl_to_reference(tensor([math.log(0.5), math.log(0.25)]), tensor([math.log(0.25), math.log(0.25)]))
    assert got.tolist() == pytest.approx([0.5 + math.log(2) - 1, 0.0])


def test_kl_has_the_expectation_of_the_true_kl() -> None:
    policy, reference = [0.7, 0.2, 0.1], [0.3, 0.3, 0.4]
    true = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    estimates = losses.kl_to_reference(tensor(policy).log(), tensor(reference).log())
    assert (tensor(policy) * estimates).sum().item() == pytest.approx(true)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token", (1 + 2 + 3 + 4 + 5 + 6) / 6),
        ("sequence", (1 + (2 + 3) / 2 + (4 + 5 + 6) / 3) / 3),
        ("group", ((1 + 2 + 3) / 3 + (4 + 5 + 6) / 3) / 2),
    ],
)
def test_aggregation_by_hand(aggregate: str, expected: float) -> None:
    sequences, groups = [[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]], [0, 0, 1]
    weights = losses.token_weights([len(sequence) for sequence in sequences], groups, aggregate)
    total = sum(weight * value for weight, sequence in zip(weights, sequences, strict=True) for value in sequence)
    assert total == pytest.approx(expected)
