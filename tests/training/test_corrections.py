"""Every correction against a plain reference, and against values worked by hand."""

import math
import random
from collections.abc import Callable

import pytest
import torch

from rollart.config import CorrectionConfig
from rollart.core.errors import RollartError
from rollart.training import corrections
from rollart.training.corrections import CORRECTIONS, CorrectionInputs, correct, find

SEQUENCES = [0] * 5 + [1] * 9 + [2] * 6
TURNS = [0] * 2 + [1] * 3 + [2] * 9 + [3] * 4 + [4] * 2


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs(
    proximal: list[float],
    behaviour: list[float],
    advantages: list[float] | None = None,
    config: CorrectionConfig | None = None,
) -> CorrectionInputs:
    whole = len(proximal) == len(SEQUENCES)
    return CorrectionInputs(
        old_logprobs=tensor(proximal),
        engine_logprobs=tensor(behaviour),
        advantages=tensor(advantages or [1.0] * len(proximal)),
        sequences=torch.tensor(SEQUENCES if whole else [0] * len(proximal)),
        turns=torch.tensor(TURNS if whole else [0] * len(proximal)),
        config=config or CorrectionConfig(),
    )


def case(seed: int = 3) -> tuple[list[float], list[float], list[float]]:
    draw = random.Random(seed)
    proximal = [draw.uniform(-3, -0.05) for _ in SEQUENCES]
    return (
        proximal,
        [min(-0.01, value + draw.gauss(0, 0.4)) for value in proximal],
        [draw.gauss(0, 1) for _ in SEQUENCES],
    )


Reference = Callable[[list[float], list[float], list[float], CorrectionConfig], list[float]]


def log_ratios(p: list[float], b: list[float]) -> list[float]:
    return [one - other for one, other in zip(p, b, strict=True)]


def over(owners: list[int], values: list[float], mean: bool = False) -> list[float]:
    rows = {owner: [v for o, v in zip(owners, values, strict=True) if o == owner] for owner in set(owners)}
    return [sum(rows[owner]) / (len(rows[owner]) if mean else 1) for owner in owners]


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def m2po_reference(p: list[float], b: list[float], _: list[float], c: CorrectionConfig) -> list[float]:
    kept = dict(enumerate(value**2 for value in log_ratios(p, b)))
    while kept and sum(kept.values()) / len(kept) > c.m2po:
        del kept[max(kept, key=lambda i: kept[i])]
    return [float(i in kept) for i in range(len(p))]


REFERENCES: dict[str, Reference] = {
    "token": lambda p, b, _, c: [min(c.cap, math.exp(r)) for r in log_ratios(p, b)],
    "turn": lambda p, b, _, c: [min(c.cap, math.exp(r)) for r in over(TURNS, log_ratios(p, b))],
    "sequence": lambda p, b, _, c: [min(c.cap, math.exp(r)) for r in over(SEQUENCES, log_ratios(p, b))],
    "geometric": lambda p, b, _, c: [min(c.cap, math.exp(r)) for r in over(SEQUENCES, log_ratios(p, b), True)],
    "icepop": lambda p, b, _, c: [
        math.exp(r) if c.icepop[0] <= math.exp(r) <= c.icepop[1] else 0.0 for r in log_ratios(p, b)
    ],
    "kpop": lambda p, b, _, c: [
        float(max(binary_kl(math.exp(x), math.exp(y)), binary_kl(math.exp(y), math.exp(x))) <= c.kpop)
        for x, y in zip(p, b, strict=True)
    ],
    "dppo": lambda p, b, a, c: [
        float(not ((v > 0 and math.exp(x) - math.exp(y) > c.dppo) or (v < 0 and math.exp(y) - math.exp(x) > c.dppo)))
        for x, y, v in zip(p, b, a, strict=True)
    ],
    "m2po": m2po_reference,
    "sequence_mask": lambda p, b, _, c: [
        float(c.sequence_mask[0] <= math.exp(r) <= c.sequence_mask[1]) for r in over(SEQUENCES, log_ratios(p, b))
    ],
    "geometric_mask": lambda p, b, _, c: [
        float(c.geometric_mask[0] <= math.exp(r) <= c.geometric_mask[1])
        for r in over(SEQUENCES, log_ratios(p, b), True)
    ],
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("seed", range(4))
def test_each_correction_is_its_plain_formula(name: str, seed: int) -> None:
    config = CorrectionConfig(icepop=(0.7, 1.4), m2po=0.05, kpop=0.02, dppo=0.1)
    proximal, behaviour, advantages = case(seed)
    got = correct([CORRECTIONS.find(name)], inputs(proximal, behaviour, advantages, config))
    assert got.tolist() == pytest.approx(REFERENCES[name](proximal, behaviour, advantages, config), abs=1e-6)


def test_every_correction_that_ships_has_a_reference_here() -> None:
    assert set(CORRECTIONS.names()) == set(REFERENCES)


def test_masks_act_in_the_cases_above() -> None:
    """Otherwise the references would agree about nothing."""
    for name in ("icepop", "kpop", "dppo", "m2po", "sequence_mask", "geometric_mask"):
        config = CorrectionConfig(icepop=(0.7, 1.4), m2po=0.05, kpop=0.02)
        factors = [correct([CORRECTIONS.find(name)], inputs(*case(seed), config)) for seed in range(4)]
        dropped = (torch.cat(factors) == 0).double().mean().item()
        assert 0 < dropped < 1, name


def test_tokens_of_the_policy_itself_are_left_alone() -> None:
    proximal, _, advantages = case()
    for name in CORRECTIONS.names():
        factor = correct([CORRECTIONS.find(name)], inputs(proximal, proximal, advantages))
        assert factor.tolist() == pytest.approx([1.0] * len(proximal)), name


def test_factors_multiply_and_nothing_is_the_default_of_an_empty_list() -> None:
    proximal, behaviour, advantages = case()
    given = inputs(proximal, behaviour, advantages)
    both = correct(find(CorrectionConfig(use=("token", "dppo"))), given)
    assert torch.equal(both, corrections.token(given) * corrections.dppo(given))
    assert correct([], given).tolist() == [1.0] * len(proximal)


def test_no_correction_passes_a_gradient() -> None:
    proximal, behaviour, advantages = case()
    given = inputs(proximal, behaviour, advantages)
    given.old_logprobs.requires_grad_()
    for name in CORRECTIONS.names():
        assert not correct([CORRECTIONS.find(name)], given).requires_grad, name


def test_a_loss_of_sequences_gets_weights_of_sequences() -> None:
    assert find(CorrectionConfig(use=("token",)), one_ratio_per_sequence=True) == [corrections.geometric]
    assert find(CorrectionConfig(use=("turn", "dppo")), one_ratio_per_sequence=True) == [
        corrections.geometric,
        corrections.dppo,
    ]


def test_the_short_forms_of_the_run_file() -> None:
    assert CorrectionConfig.model_validate("icepop").use == ("icepop",)
    assert CorrectionConfig.model_validate(["token", "dppo"]).use == ("token", "dppo")
    assert CorrectionConfig.model_validate([]).use == ()
    with pytest.raises(ValueError, match="range of positive numbers"):
        CorrectionConfig(icepop=(2.0, 0.5))


def test_a_correction_of_the_wrong_shape_is_named() -> None:
    def mean(given: CorrectionInputs) -> torch.Tensor:
        return given.log_ratio.mean()

    with pytest.raises(RollartError, match="'mean' must return one factor per token"):
        correct([mean], inputs([-1.0, -2.0], [-1.0, -2.0]))
