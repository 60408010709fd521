"""Losses and advantages of the user, by `module:function`."""

from pathlib import Path

import pytest
import torch
from tiny_models import make_batch, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.errors import ConfigError, RollartError
from rollart.training.advantages import ADVANTAGES
from rollart.training.losses import LOSSES
from rollart.training.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.5, 0.0], [0.0, 1.0], [1.0, 1.0]]
OWN = """\
from collections.abc import Sequence

from torch import Tensor

from rollart.training.losses import LossInputs


def my_loss(inputs: LossInputs) -> Tensor:
    return -inputs.ratio.detach() * inputs.advantages * inputs.logprobs


def my_advantage(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[reward - sum(rewards) / len(rewards) for reward in rewards] for rewards in groups]


def mean_loss(inputs: LossInputs) -> Tensor:
    return my_loss(inputs).mean()


def one_number(groups: Sequence[Sequence[float]]) -> list[float]:
    return [[1.0] for _ in groups]


not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_algorithm.py").write_text(OWN)
    (tmp_path / "broken_algorithm.py").write_text("def my_loss(inputs): ...\nraise ZeroDivisionError('oh')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return save_tiny(tmp_path / "model")


def trained(folder: Path, **algorithm: str) -> dict[str, torch.Tensor]:
    trainer = Trainer(folder, TrainingConfig(epochs=2, pack_tokens=64, algorithm=AlgorithmConfig(**algorithm)))  # type: ignore[arg-type]
    for step in range(2):
        assert trainer.step(make_batch(step, REWARDS)).values["updates"] == 2
    return trainer.snapshot()[1]


def test_own_loss_and_advantage_train_as_the_shipped_ones_of_the_same_formula(folder: Path) -> None:
    shipped = trained(folder, loss="reinforce", advantage="dr_grpo")
    own = trained(folder, loss="own_algorithm:my_loss", advantage="own_algorithm:my_advantage")
    assert all(torch.equal(shipped[name], own[name]) for name in shipped)
    other = trained(folder, loss="own_algorithm:my_loss", advantage="grpo")
    assert not all(torch.equal(shipped[name], other[name]) for name in shipped)


@pytest.mark.parametrize(
    ("key", "name", "sentence"),
    [
        ("loss", "ppoo", r"loss must be .*ppo, .* or module:function, not 'ppoo'; did you mean 'ppo'\?"),
        ("advantage", "gpro", r"advantage must be grpo, .* not 'gpro'; did you mean 'grpo'\?"),
        ("loss", "no_such:f", "loss names module 'no_such', which cannot be found"),
        ("loss", "own_algorithm:my_los", r"names 'my_los', which .* does not have; did you mean 'my_loss'\?"),
        ("advantage", "own algorithm:f", "must look like package.module:function, not 'own algorithm:f'"),
        ("loss", "broken_algorithm:my_loss", "'broken_algorithm:my_loss' cannot be imported: ZeroDivisionError: oh"),
        ("loss", "own_algorithm:not_a_function", "'own_algorithm:not_a_function' is not a function"),
    ],
)
def test_a_trainer_does_not_start_with_a_wrong_name(folder: Path, key: str, name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"training.algorithm.{key} .*{sentence.removeprefix(key).strip()}"):
        Trainer(folder, TrainingConfig(algorithm=AlgorithmConfig(**{key: name})))  # type: ignore[arg-type]


def test_a_loss_returns_one_value_per_token(folder: Path) -> None:
    with pytest.raises(RollartError, match=r"'own_algorithm:mean_loss' must return one value per token, .* not \(\)"):
        trained(folder, loss="own_algorithm:mean_loss")


def test_an_advantage_returns_one_number_per_reward(folder: Path) -> None:
    with pytest.raises(RollartError, match="'one_number' must return one number for each reward of each group"):
        trained(folder, advantage="own_algorithm:one_number")


def test_every_shipped_function_is_found_by_its_name() -> None:
    for name in ("ppo", "gspo", "cispo", "reinforce"):
        assert LOSSES.find(name).__name__ == name
    for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp"):
        assert ADVANTAGES.find(name).__name__ == name
