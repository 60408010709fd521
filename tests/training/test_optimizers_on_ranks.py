"""Every optimizer makes the update of one process, however its ranks divide the model."""

from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import on_ranks
from tiny_models import make_batch, save_tiny
from torch import Tensor

from benchmarks.parallel import Case as LayoutCase
from benchmarks.parallel import config_of, make_models, on_processes
from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.types import Batch, StepMetrics
from rollart.hardware.layout import Layout
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.matrix_optimizers import moments, read_state
from rollart.training.optimizers import make_optimizer
from rollart.training.policy import PolicyModel
from rollart.training.ranks import RankAddress, Ranks
from rollart.training.shards import block
from rollart.training.trainer import Trainer

UPDATES = 3
GROUPS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0], [0.5, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0, 0.0]]


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    mine = block(like)
    return whole[tuple(slice(at, at + size) for at, size in zip(mine.offset, mine.values.shape, strict=True))]


def update(policy: PolicyModel, config: TrainingConfig) -> dict[str, dict[str, Tensor]]:
    """Updates with gradients that are the same in every layout; then this rank's part of weights and moments."""
    optimizer = make_optimizer(policy, config)
    for seed in range(UPDATES):
        draw = torch.Generator().manual_seed(seed)
        for parameter in policy.parameters().values():
            grad = torch.randn(parameter.shape, generator=draw) * 0.01
            parameter.grad = torch.zeros_like(parameter)
            block(parameter.grad).values.copy_(part_of(grad, parameter))
        optimizer.step()
    out = {"policy": {name: block(p).values.clone() for name, p in policy.parameters().items()}}
    for name, parameter in policy.parameters().items():
        state = read_state(optimizer, parameter)
        for kind in moments(optimizer, parameter):
            out.setdefault(kind, {})[name] = block(state[kind]).values.clone()
    return out


def compare(case: LayoutCase, folder: Path, address: RankAddress) -> None:
    """On one of the ranks."""
    torch.set_num_threads(1)
    ranks = Ranks.join(address, layout=case.layout, patience=60.0)
    policy = PolicyModel(folder / case.model, ranks, config_of(case))
    got, expected = update(policy, config_of(case)), torch.load(folder / "expected.pt")
    assert got.keys() == expected.keys()
    worst = 0.0
    for kind, tensors in got.items():
        for name, values in tensors.items():
            error = (values - part_of(expected[kind][name], policy.parameters()[name])).abs()
            worst = max(worst, float(error.max() / expected[kind][name].abs().max()) if error.numel() else 0.0)
    (folder / f"error-{address.rank}").write_text(str(worst))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "optimizer"),
    [
        ("dense", Layout(data=2), "muon"),
        ("untied", Layout(tensor=2), "muon"),
        ("dense", Layout(context=2), "muon"),
        ("moe", Layout(data=2, expert=2), "muon"),
        ("untied", Layout(data=2, tensor=2), "muon"),
        ("moe", Layout(data=2, tensor=2, expert=2), "muon"),
        ("moe", Layout(data=2, context=2, expert=4), "muon"),
        ("moe", Layout(data=2, tensor=2, expert=4), "adamw"),
        ("dense", Layout(data=3), "adamw_8bit"),
        ("moe", Layout(data=2, expert=2), "adamw_8bit"),
    ],
    ids=str,
)
def test_an_update_does_not_depend_on_the_layout(tmp_path: Path, model: str, layout: Layout, optimizer: str) -> None:
    make_models(tmp_path)
    settings = {"optimizer": optimizer, "lr": 0.02, "weight_decay": 0.1}
    torch.save(update(PolicyModel(tmp_path / model), TrainingConfig.model_validate(settings)), tmp_path / "expected.pt")
    on_processes(layout.ranks, compare, LayoutCase(model, layout, settings=settings), tmp_path)
    errors = [float((tmp_path / f"error-{rank}").read_text()) for rank in range(layout.ranks)]
    assert max(errors) < 1e-5


def learn(batches: list[Batch], trainer: Trainer) -> tuple[list[StepMetrics], dict[str, Tensor]]:
    return [trainer.step(batch) for batch in batches], trainer.snapshot()[1]


def go_on(source: Path, target: Path, batch: Batch, trainer: Trainer) -> StepMetrics:
    load_checkpoint(trainer, source)
    metrics = trainer.step(batch)
    save_checkpoint(trainer, target).result()
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-4), ("muon", 1e-4), ("adamw_8bit", 1e-3)])
def test_two_ranks_learn_from_mini_batches_what_one_learns(tmp_path: Path, optimizer: str, tolerance: float) -> None:
    """What summing in another order changes may be enough to round a moment of 8 bits the other way."""
    config = TrainingConfig(
        optimizer=optimizer, updates=4, epochs=2, pack_tokens=48, algorithm=AlgorithmConfig(kl=0.05, entropy=0.01)
    )
    save_tiny(tmp_path)
    batches = [make_batch(step, GROUPS, seed=step) for step in range(3)] + [make_batch(3, [[1.0, 0.5], [0.0]])]
    expected, weights = learn(batches, Trainer(tmp_path, config))
    got, spread = on_ranks(2, tmp_path, config, partial(learn, batches))
    for left, right in zip(got, expected, strict=True):
        assert left.values == pytest.approx(right.values, abs=tolerance)
    assert [step.values["updates"] for step in got] == [8.0, 8.0, 8.0, 4.0]
    assert max((spread[name] - weights[name]).abs().max().item() for name in weights) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "tolerance"), [("muon", 1e-4), ("adamw_8bit", 1e-3)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, optimizer: str, tolerance: float) -> None:
    config = TrainingConfig(optimizer=optimizer, updates=4, lr_schedule="linear", steps=3)
    folder = save_tiny(tmp_path / "model")
    paths = [tmp_path / f"step-{step}" for step in range(3)]
    batches = [make_batch(step, GROUPS, seed=step) for step in range(3)]
    alone = Trainer(folder, config)
    alone.step(batches[0])
    save_checkpoint(alone, paths[1]).result()
    got = on_ranks(2, folder, config, partial(go_on, paths[1], paths[2], batches[1]))
    assert got.values == pytest.approx(alone.step(batches[1]).values, abs=tolerance)
    resumed = Trainer(folder, config)
    load_checkpoint(resumed, paths[2])
    assert resumed.step(batches[2]).values == pytest.approx(alone.step(batches[2]).values, abs=tolerance)
    left, right = resumed.snapshot()[1], alone.snapshot()[1]
    assert max((left[name] - right[name]).abs().max().item() for name in left) < tolerance
