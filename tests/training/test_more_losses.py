"""Losses beyond the clipped ones: each against a plain reference of a few lines, gradients included."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollart.config import AlgorithmConfig
from rollart.core.errors import RollartError
from rollart.training.losses import LOSSES, LossInputs, policy_loss, weighted_kl

SEQUENCE = torch.arange(24) // 6  # four sequences, two pairs
CONFIG = AlgorithmConfig(clip_low=0.2, clip_high=0.28, beta=0.3)


def make(seed: int = 0, name: str = "ppo") -> LossInputs:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=draw, dtype=torch.float64)

    current = -normal(24).abs()
    teacher = (normal(24, 5)).log_softmax(-1)
    student = (normal(24, 5)).log_softmax(-1)
    return LossInputs(
        logprobs=current.requires_grad_(),
        old_logprobs=current.detach() + normal(24, scale=0.3),
        engine_logprobs=current.detach() + normal(24, scale=0.3),
        advantages=normal(4)[SEQUENCE],
        sequences=SEQUENCE,
        config=CONFIG.model_copy(update={"loss": name}),
        reference_logprobs=current.detach() + normal(24, scale=0.3),
        teacher_logprobs=current.detach() + normal(24, scale=0.3),
        top_logprobs=student[:, :3].detach().requires_grad_(),
        teacher_top_logprobs=teacher[:, :3],
    )


def rows(values: Tensor) -> Tensor:
    """Six tokens of four sequences."""
    return values.view(4, 6)


def at_tokens(values: Tensor) -> Tensor:
    return values.repeat_interleave(6)


def gspo_token(i: LossInputs) -> Tensor:
    ratio = at_tokens(rows(i.logprobs - i.old_logprobs).mean(1)).exp().detach() * torch.exp(
        i.logprobs - i.logprobs.detach()
    )
    return -torch.minimum(ratio * i.advantages, ratio.clamp(0.8, 1.28) * i.advantages)


def topr(i: LossInputs) -> Tensor:
    ratio = at_tokens(rows(i.logprobs - i.engine_logprobs).sum(1).exp().clamp(0, 1)).detach()
    return -torch.where(i.advantages > 0, torch.ones(()).double(), ratio) * i.advantages * i.logprobs


def raft_pp(i: LossInputs) -> Tensor:
    ratio = (i.logprobs - i.old_logprobs).exp()
    loss = -torch.minimum(ratio * i.advantages, ratio.clamp(0.8, 1.28) * i.advantages)
    return torch.where(i.advantages > 0, loss, torch.zeros(()).double())


def sapo(i: LossInputs) -> Tensor:
    ratio = (i.logprobs - i.old_logprobs).exp()
    tau = torch.where(i.advantages > 0, 1.0, 1.05).double()
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * i.advantages


def squared(i: LossInputs) -> Tensor:
    return -i.advantages * i.logprobs + 0.15 * (i.logprobs - i.engine_logprobs) ** 2


def margin(i: LossInputs, mean: bool) -> Tensor:
    assert i.reference_logprobs is not None
    ratios = rows(i.logprobs - i.reference_logprobs)
    return chosen_less_rejected(i, ratios.mean(1) if mean else ratios.sum(1))


def chosen_less_rejected(i: LossInputs, values: Tensor) -> Tensor:
    better = rows(i.advantages)[:, 0]
    pairs = [(0, 1) if better[0] > better[1] else (1, 0), (2, 3) if better[2] > better[3] else (3, 2)]
    return torch.stack([values[chosen] - values[rejected] for chosen, rejected in pairs])


def dpo(i: LossInputs) -> Tensor:
    return -torch.nn.functional.logsigmoid(0.3 * margin(i, False)).repeat_interleave(12)


def ipo(i: LossInputs) -> Tensor:
    return ((margin(i, True) - 1 / 0.6) ** 2).repeat_interleave(12)


def bradley_terry(i: LossInputs) -> Tensor:
    margins = chosen_less_rejected(i, rows(i.logprobs).sum(1))
    return -torch.nn.functional.logsigmoid(margins).repeat_interleave(12)


def opd(i: LossInputs) -> Tensor:
    assert i.teacher_logprobs is not None
    ratio = (i.logprobs - i.old_logprobs).exp().detach()
    return -ratio * (i.teacher_logprobs - i.logprobs).detach() * i.logprobs


def both(i: LossInputs) -> tuple[Tensor, Tensor]:
    assert i.top_logprobs is not None and i.teacher_top_logprobs is not None
    return tuple(
        torch.cat([top, (1 - top.exp().sum(-1, keepdim=True)).log()], -1)
        for top in (i.top_logprobs, i.teacher_top_logprobs)
    )  # type: ignore[return-value]


def reverse_kl(i: LossInputs) -> Tensor:
    ours, theirs = both(i)
    return torch.nn.functional.kl_div(theirs, ours, log_target=True, reduction="none").sum(-1)


def forward_kl(i: LossInputs) -> Tensor:
    ours, theirs = both(i)
    return torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1)


def jensen_shannon(i: LossInputs) -> Tensor:
    ours, theirs = both(i)
    middle = ((ours.exp() + theirs.exp()) / 2).log()
    halves = [torch.nn.functional.kl_div(middle, x, log_target=True, reduction="none").sum(-1) for x in (ours, theirs)]
    return (halves[0] + halves[1]) / 2


REFERENCES: dict[str, Callable[[LossInputs], Tensor]] = {
    "reinforce": lambda i: -(i.logprobs - i.old_logprobs).exp().detach() * i.advantages * i.logprobs,
    "sft": lambda i: -i.logprobs,
    **{
        function.__name__: function
        for function in (
            gspo_token,
            topr,
            raft_pp,
            sapo,
            squared,
            dpo,
            ipo,
            bradley_terry,
            opd,
            reverse_kl,
            forward_kl,
            jensen_shannon,
        )
    },
}
BY_HAND = {"ppo", "gspo", "cispo"}  # in test_losses.py


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(3))
def test_each_loss_is_its_plain_formula_and_so_is_its_gradient(name: str, seed: int) -> None:
    values, slopes = [], []
    for function in (lambda i: policy_loss(LOSSES.find(name), i).loss, REFERENCES[name]):
        given = make(seed, name)
        assert given.top_logprobs is not None
        loss = function(given)
        weights = torch.linspace(0.1, 1, 24, dtype=torch.float64)
        grads = torch.autograd.grad((weights * loss).sum(), [given.logprobs, given.top_logprobs], allow_unused=True)
        values.append(loss)
        slopes.append([torch.zeros(1).double() if grad is None else grad for grad in grads])
    torch.testing.assert_close(values[0], values[1], atol=1e-6, rtol=1e-6)
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_every_loss_that_ships_has_a_reference() -> None:
    assert set(LOSSES.names()) == set(REFERENCES) | BY_HAND


def test_the_gradient_of_the_weighted_kl_is_that_of_the_kl() -> None:
    """Over a small vocabulary: the expectation over samples of an older policy."""
    logits = torch.tensor([0.3, -0.5, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    behaviour = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    current = logits.log_softmax(0)
    (true,) = torch.autograd.grad((current.exp() * (current - reference)).sum(), logits)
    current = logits.log_softmax(0)
    inputs = LossInputs(current, current.detach(), behaviour, current, torch.zeros(3).long(), CONFIG)
    estimates = weighted_kl(inputs, reference, (current.detach() - behaviour).exp())
    (estimated,) = torch.autograd.grad((behaviour.exp() * estimates).sum(), logits)
    torch.testing.assert_close(estimated, true)


def test_a_loss_without_its_teacher_or_its_pairs_says_so() -> None:
    given = make(0, "opd")
    bare = LossInputs(
        given.logprobs, given.old_logprobs, given.engine_logprobs, given.advantages, given.sequences, given.config
    )
    with pytest.raises(RollartError, match="needs the logprobs of a teacher"):
        policy_loss(LOSSES.find("opd"), bare)
    with pytest.raises(RollartError, match="needs the logprobs of the reference"):
        policy_loss(LOSSES.find("dpo"), bare)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_a_loss_compares_the_likeliest_tokens_that_it_asks_for_though_other_tasks_ask_for_more(name: str) -> None:
    given = make(0, name)
    assert given.top_logprobs is not None and given.teacher_top_logprobs is not None
    two = replace(given, top_logprobs=given.top_logprobs[:, :2], teacher_top_logprobs=given.teacher_top_logprobs[:, :2])
    narrow = replace(given, config=given.config.model_copy(update={"teacher_top": 2}))
    loss, expected, all_three = (policy_loss(LOSSES.find(name), each).loss for each in (narrow, two, given))
    torch.testing.assert_close(loss, expected)
    assert not torch.allclose(loss, all_three)
