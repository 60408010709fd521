"""Optimizers against plain references, and their state as a checkpoint sees it."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_batch, save_tiny
from torch import Tensor

from rollart.config import TrainingConfig
from rollart.core.errors import ConfigError, RollartError
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.matrix_optimizers import Quantised, moments, orthogonal, read_state, write_state
from rollart.training.optimizers import OPTIMIZERS, learning_rate, make_optimizer
from rollart.training.policy import PolicyModel
from rollart.training.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0]]
NAMES = ["adamw", "muon", "adamw_8bit"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


def draw_gradients(policy: PolicyModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters().values():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.01


def after_updates(folder: Path, config: TrainingConfig, updates: int = 3) -> tuple[PolicyModel, dict[str, Tensor]]:
    policy = PolicyModel(folder)
    optimizer = make_optimizer(policy, config)
    for seed in range(updates):
        draw_gradients(policy, seed)
        optimizer.step()
    return policy, {name: parameter.detach().clone() for name, parameter in policy.parameters().items()}


def test_singular_values_of_an_orthogonal_update_are_about_one() -> None:
    draw = torch.Generator().manual_seed(0)
    for shape in ((24, 40), (40, 24), (3, 16, 32), (3, 32, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=draw)))
        assert values.min() > 0.6 and values.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(4, 5)), torch.zeros(4, 5))


def test_muon_makes_the_updates_of_torch(folder: Path) -> None:
    """torch's Muon iterates in bfloat16, so updates agree to its precision."""
    config = TrainingConfig(optimizer="muon", lr=0.02, weight_decay=0.1)
    policy, got = after_updates(folder, config)
    start = PolicyModel(folder).parameters()
    expected = PolicyModel(folder)
    names = [name for name, p in expected.parameters().items() if p.ndim == 2 and name not in policy.embeddings()]
    optimizer = torch.optim.Muon(
        [expected.parameters()[name] for name in names],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    for seed in range(3):
        draw_gradients(expected, seed)
        optimizer.step()
    assert len(names) == 14
    for name in names:
        ours, theirs = got[name] - start[name], expected.parameters()[name] - start[name]
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_what_is_no_matrix_is_updated_by_adamw(folder: Path) -> None:
    policy, got = after_updates(folder, TrainingConfig(optimizer="muon", lr=0.02, weight_decay=0.1))
    _, expected = after_updates(folder, TrainingConfig(lr=0.02, weight_decay=0.1))
    same = {name for name in got if torch.equal(got[name], expected[name])}
    assert policy.embeddings() == {"model.embed_tokens.weight"}
    assert same == {name for name, value in got.items() if value.ndim == 1} | policy.embeddings()


def test_the_update_of_muon_is_as_large_as_that_of_adamw(folder: Path) -> None:
    start = PolicyModel(folder).parameters()
    sizes = []
    for name in ("muon", "adamw"):
        _, got = after_updates(folder, TrainingConfig(optimizer=name, lr=0.01), updates=1)
        sizes.append(torch.cat([(got[n] - start[n]).flatten() for n in got if got[n].ndim == 2]).square().mean().sqrt())
    assert 0.1 < sizes[0] / sizes[1] < 1.0


def test_eight_bits_update_almost_as_float32(folder: Path) -> None:
    start = PolicyModel(folder).parameters()
    _, got = after_updates(folder, TrainingConfig(optimizer="adamw_8bit", lr=0.01, weight_decay=0.1), updates=20)
    _, expected = after_updates(folder, TrainingConfig(lr=0.01, weight_decay=0.1), updates=20)
    for name, value in got.items():
        if value.ndim == 1:
            assert torch.equal(value, expected[name])
        else:
            assert (value - expected[name]).norm() < 0.03 * (expected[name] - start[name]).norm()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (2, 700), (4, 3, 300), (2, 0), (0, 7)])
def test_what_was_packed_before_is_packed_without_a_loss(shape: tuple[int, ...], signed: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=draw) * torch.rand(shape, generator=draw).pow(4)
    values = values if signed else values.square()
    once = Quantised(values, signed=signed).values()
    assert torch.equal(Quantised(once, signed=signed).values(), once)
    largest = values.abs().amax() if values.numel() else torch.ones(())
    assert bool(((once - values).abs() <= 0.012 * largest).all())


def test_a_small_divisor_does_not_become_zero() -> None:
    kept = Quantised(torch.tensor([[1.0, 1e-12, 0.0]]), signed=False).values()
    assert bool((kept > 0).all())
    assert torch.equal(Quantised(torch.zeros(1, 3), signed=False).values(), torch.zeros(1, 3))


@pytest.mark.parametrize("name", NAMES)
def test_state_that_was_read_and_written_goes_on_alike(folder: Path, name: str) -> None:
    config = TrainingConfig(optimizer=name)
    policy, _ = after_updates(folder, config)
    optimizer = make_optimizer(policy, config)
    assert all(read_state(optimizer, p) == {} for p in policy.parameters().values())
    draw_gradients(policy, 7)
    optimizer.step()
    other = make_optimizer(policy, config)
    for parameter in policy.parameters().values():
        state = read_state(optimizer, parameter)
        assert set(state) == {"step", *moments(optimizer, parameter)}
        assert all(state[kind].shape == parameter.shape for kind in moments(optimizer, parameter))
        write_state(other, parameter, {key: value.clone() for key, value in state.items()})
    before = {key: p.detach().clone() for key, p in policy.parameters().items()}
    ends = []
    for subject in (optimizer, other):
        for key, parameter in policy.parameters().items():
            parameter.data.copy_(before[key])
        draw_gradients(policy, 8)
        subject.step()
        ends.append({key: p.detach().clone() for key, p in policy.parameters().items()})
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in before)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_exactly(folder: Path, tmp_path: Path, name: str) -> None:
    config = TrainingConfig(optimizer=name, updates=2, epochs=2, lr_schedule="cosine", lr_warmup=3, steps=4)
    trainer = Trainer(folder, config)
    for step in range(2):
        trainer.step(make_batch(step, REWARDS, seed=step))
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    resumed = Trainer(folder, config)
    load_checkpoint(resumed, tmp_path / "checkpoint")
    for step in (2, 3):
        expected, got = (each.step(make_batch(step, REWARDS, seed=step)) for each in (trainer, resumed))
        assert got.values == expected.values
    left, right = trainer.snapshot()[1], resumed.snapshot()[1]
    assert all(torch.equal(left[key], right[key]) for key in left)


def test_an_optimizer_that_lacks_a_moment_says_so_on_resume(folder: Path, tmp_path: Path) -> None:
    trainer = Trainer(folder, TrainingConfig(optimizer="muon"))
    trainer.step(make_batch(0, REWARDS))
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    with pytest.raises(RollartError, match=r"another training\.optimizer.*exp_avg_sq of model\.layers\.0"):
        load_checkpoint(Trainer(folder, TrainingConfig()), tmp_path / "checkpoint")


def test_an_optimizer_of_the_user_learns_and_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_optimizer.py").write_text(
        "import torch\n"
        "def adam(policy, config):\n"
        "    return torch.optim.Adam(policy.parameters().values(), lr=config.lr, betas=config.betas)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = TrainingConfig(optimizer="own_optimizer:adam")
    trainer, shipped = Trainer(folder, config), Trainer(folder, TrainingConfig())
    for subject in (trainer, shipped):
        subject.step(make_batch(0, REWARDS))
    save_checkpoint(trainer, tmp_path / "checkpoint").result()
    load_checkpoint(trainer, tmp_path / "checkpoint")
    for subject in (trainer, shipped):
        subject.step(make_batch(1, REWARDS))
    left, right = trainer.snapshot()[1], shipped.snapshot()[1]
    assert max((left[key] - right[key]).abs().max().item() for key in left) < 1e-5


def test_an_unknown_optimizer_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.optimizer must be adamw, muon, .* did you mean 'muon'"):
        make_optimizer(PolicyModel(folder), TrainingConfig(optimizer="muonn"))
    assert [OPTIMIZERS.find(name).__name__ for name in NAMES] == NAMES


@pytest.mark.parametrize(
    ("schedule", "end", "expected"),
    [
        ("constant", None, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", None, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ("linear", 0.2, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ("cosine", None, [1.0, 0.853553, 0.5, 0.146447, 0.0]),
        ("cosine", 1.0, [1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules_by_hand(schedule: str, end: float | None, expected: list[float]) -> None:
    config = TrainingConfig.model_validate(
        {"steps": 5, "lr": 2.0, "lr_schedule": schedule, "lr_end": end, "lr_warmup": 0}
    )
    rates = [learning_rate(config, step, updates=3 * step) for step in range(5)]
    assert rates == pytest.approx([2 * value for value in expected], abs=1e-6)
    assert learning_rate(config, 50, updates=150) == pytest.approx(rates[-1])


def test_warmup_counts_updates() -> None:
    config = TrainingConfig(steps=100, lr=1.0, lr_warmup=4)
    assert [learning_rate(config, 0, updates) for updates in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"lr_end": 0.1}, "lr_end needs lr_schedule"),
        ({"updates": 17}, r"updates \(17\) must not exceed batch_groups \(16\)"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TrainingConfig.model_validate(keys)
