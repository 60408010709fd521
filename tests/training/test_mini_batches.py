"""Several updates on one batch: how it is split, and what they compare themselves with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_batch, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.column import Column
from rollart.core.types import Batch, Sample, StepMetrics
from rollart.training.advantages import ADVANTAGES, spread_over_tokens
from rollart.training.algorithms import Algorithms
from rollart.training.learner import Learn
from rollart.training.microbatch import split_into_mini_batches
from rollart.training.packing import deal, pack
from rollart.training.policy import multiplies_bfloat16
from rollart.training.ranks import Ranks
from rollart.training.trainer import Trainer

GROUPS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0], [0.5, 0.0], [0.0, 0.0], [0.0, 1.0, 0.0]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def steps(folder: Path, *, count: int = 1, algorithm: dict[str, object] | None = None, **keys: object) -> StepMetrics:
    config = TrainingConfig.model_validate({"lr_warmup": 0, "algorithm": algorithm or {}, **keys})
    trainer = Trainer(folder, config)
    return [trainer.step(make_batch(step, GROUPS, seed=step)) for step in range(count)][-1]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_dealing_is_even_in_number_and_in_size(sizes: list[int], parts: int) -> None:
    out = deal(sizes, parts)
    assert sorted(i for part in out for i in part) == list(range(len(sizes)))
    counts = [len(part) for part in out]
    assert max(counts) - min(counts) <= 1
    totals = [sum(sizes[i] for i in part) for part in out]
    assert max(totals) - min(totals) <= max(sizes)
    filled = [sum(sizes[i] > 0 for i in part) for part in out]
    assert max(filled) - min(filled) <= 1


def test_groups_stay_whole_and_every_update_has_a_gradient() -> None:
    batch = make_batch(0, GROUPS)
    values = ADVANTAGES.find("grpo")([list(group.rewards.values()) for group in batch.groups])
    assert any(values[3]) and not any(values[4])
    scores = spread_over_tokens(batch, values)
    for updates, count in ((1, 1), (2, 2), (4, 4), (6, 5)):
        parts = split_into_mini_batches(batch, scores, updates, Algorithms(AlgorithmConfig()))
        assert len(parts) == count
        assert sorted(i for part in parts for i in part) == list(range(6))
        assert all(any(any(values[i]) for i in part) for part in parts)
    assert len(split_into_mini_batches(batch, scores, 6, Algorithms(AlgorithmConfig(entropy=0.1)))) == 6


@pytest.mark.parametrize("aggregate", ["token", "sequence", "group"])
def test_token_weights_of_every_mini_batch_add_up_to_one(folder: Path, aggregate: str) -> None:
    seen: list[Learn] = []
    algorithm = AlgorithmConfig(aggregate=aggregate, entropy=0.1)  # type: ignore[arg-type]
    trainer = Trainer(folder, TrainingConfig(updates=3, pack_tokens=64, algorithm=algorithm))
    learn = trainer.learner.learn
    trainer.learner.learn = lambda order: [seen.append(order), learn(order)][1]  # type: ignore[assignment,func-returns-value]
    trainer.step(make_batch(0, GROUPS))
    (order,) = seen
    assert len(order.mini_batches) == 3
    for one in order.mini_batches:
        items = [item for part in one.passes for item in part]
        assert sum(item.weight * item.actions for item in items) == pytest.approx(1.0)


def test_updates_and_epochs_multiply(folder: Path) -> None:
    for updates, epochs in ((1, 1), (3, 1), (1, 2), (3, 2)):
        assert steps(folder, updates=updates, epochs=epochs).values["updates"] == updates * epochs


def test_later_updates_are_clipped_against_the_policy_before_the_first(folder: Path) -> None:
    """With no learning rate there is nothing to clip; with a large one only the first update is sure to be in range."""
    assert steps(folder, updates=3, lr=1e-12).values["clip_fraction"] == 0.0
    assert steps(folder, updates=3, lr=0.05).values["clip_fraction"] > 0.0
    assert steps(folder, updates=1, lr=0.05).values["clip_fraction"] == 0.0


def test_gap_entropy_and_importance_are_those_before_the_first_update(folder: Path) -> None:
    one = steps(folder, updates=1, lr=0.05)
    many = steps(folder, updates=5, epochs=2, lr=0.05, pack_tokens=40)
    for name in ("entropy", "logprob_gap", "importance", "action_tokens"):
        assert many.values[name] == pytest.approx(one.values[name], rel=1e-5)
    assert [gap.tokens for gap in many.gaps] == [gap.tokens for gap in one.gaps]


def test_every_mini_batch_has_the_learning_rate_of_its_own_evidence(folder: Path) -> None:
    """Two groups with spread and two without: each update has one of both."""
    trainer = Trainer(folder, TrainingConfig(lr=1e-3, lr_warmup=0, updates=2))
    metrics = trainer.step(make_batch(0, [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]))
    assert metrics.values["lr"] == pytest.approx(0.5e-3)


def test_an_update_that_is_not_finite_ends_the_step(folder: Path) -> None:
    """The poisoned group is the shortest, so it is in the last update."""
    batch = make_batch(0, [[1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 0.0], [0.0, float("inf")]])
    metrics = Trainer(folder, TrainingConfig(updates=3)).step(batch)
    assert metrics.values["skipped"] == 1.0
    assert metrics.values["updates"] == 2.0
    assert any("stopped after 2 updates" in warning for warning in metrics.warnings)


def likelihoods(folder: Path, **keys: object) -> tuple[float, float, float]:
    """Logprob of the good and the bad samples of a batch after ten steps on it, and the gap of the first step to
    logprobs of an engine in float32 with the same weights."""
    exact = Trainer(folder, TrainingConfig())
    trainer = Trainer(folder, TrainingConfig.model_validate({"lr": 3e-3, "lr_warmup": 0, **keys}))
    good, bad, gap = 0.0, 0.0, 0.0
    for step in range(10):
        made = make_batch(step, [[1.0, 0.0], [1.0, 0.0]])
        scorer = exact if step == 0 else trainer
        batch = Batch(
            step,
            tuple(
                replace(group, samples=tuple(replace(s, logprobs=logprobs(scorer, s)) for s in group.samples))
                for group in made.groups
            ),
        )
        metrics = trainer.step(batch)
        assert not metrics.warnings
        gap = metrics.values["logprob_gap"] if step == 0 else gap
    for group in batch.groups:
        good += float(logprobs(trainer, group.samples[0]).array.sum())
        bad += float(logprobs(trainer, group.samples[1]).array.sum())
    return good, bad, gap


def logprobs(trainer: Trainer, sample: Sample) -> Column:
    with torch.no_grad():
        values, _ = trainer.learner.policy.logprobs(pack([sample.tokens.array], [sample.mask]))
    return Column.floats(values.float().numpy())


@pytest.mark.slow
def test_bfloat16_learns_like_float32_and_its_gap_is_rounding(folder: Path) -> None:
    full, half = likelihoods(folder), likelihoods(folder, dtype="bfloat16")
    assert full[0] - full[1] > 20
    assert half[0] - half[1] == pytest.approx(full[0] - full[1], rel=0.1)
    assert full[2] < 1e-5 and half[2] < 0.02
    assert half[2] > 1e-5 or not multiplies_bfloat16()


@pytest.mark.parametrize("offload", [["optimizer"], ["activations"], ["optimizer", "activations"]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offload_changes_nothing_on_cpus(folder: Path, offload: list[str], dtype: str) -> None:
    expected = steps(folder, count=2, dtype=dtype)
    assert steps(folder, count=2, dtype=dtype, offload=offload).values == expected.values


def test_float32_on_cpus_stays_exact(folder: Path) -> None:
    Trainer(folder, TrainingConfig(), ranks=Ranks.single())
    assert torch.get_float32_matmul_precision() == "highest"
