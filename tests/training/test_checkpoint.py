from pathlib import Path

import pytest
import torch
from tiny_models import make_batch, save_tiny
from transformers import AutoModelForCausalLM

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.errors import RollartError
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.guard import GuardState
from rollart.training.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.5], [1.0, 1.0]]
CONFIG = TrainingConfig(algorithm=AlgorithmConfig(kl=0.05))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> tuple[Trainer, Path]:
    trainer = Trainer(folder, CONFIG)
    for step in range(3):
        trainer.step(make_batch(step, REWARDS, seed=step))
    path = tmp_path / "checkpoints" / "step-3"
    save_checkpoint(trainer, path)
    return trainer, path


def test_training_goes_on_exactly_as_if_it_had_not_stopped(saved: tuple[Trainer, Path], folder: Path) -> None:
    trainer, path = saved
    resumed = Trainer(path, CONFIG)
    load_checkpoint(resumed, path)
    assert (resumed.version, resumed.learner.updates, resumed.ranges) == (
        trainer.version,
        trainer.learner.updates,
        trainer.ranges,
    )
    assert resumed.guard.state() == trainer.guard.state() != GuardState()
    for step in (3, 4):
        expected, got = (each.step(make_batch(step, REWARDS, seed=step)) for each in (trainer, resumed))
        assert got.values == expected.values
    for left, right in zip(trainer.snapshot()[1].values(), resumed.snapshot()[1].values(), strict=True):
        assert torch.equal(left, right)


def test_a_checkpoint_is_a_model_folder_with_its_tokenizer_and_without_pickles(saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    model = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(model.lm_head.weight, trainer.learner.policy.model.lm_head.weight)
    assert "hello" in (path / "tokenizer_config.json").read_text()
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_the_folder_that_training_started_from_may_go(saved: tuple[Trainer, Path], tmp_path: Path) -> None:
    _, path = saved
    resumed = Trainer(path, CONFIG)
    load_checkpoint(resumed, path)
    path.rename(tmp_path / "elsewhere")
    save_checkpoint(resumed, tmp_path / "next")
    assert "hello" in (tmp_path / "next" / "tokenizer_config.json").read_text()


def test_a_checkpoint_replaces_the_one_in_its_place(saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    trainer.step(make_batch(3, REWARDS))
    save_checkpoint(trainer, path)
    other = Trainer(path, CONFIG)
    load_checkpoint(other, path)
    assert other.version == 4
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_save_that_fails_leaves_the_old_checkpoint(
    saved: tuple[Trainer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, path = saved

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("rollart.training.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(trainer, path)
    load_checkpoint(trainer, path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "config.json"])
def test_a_missing_or_cut_file_is_named(saved: tuple[Trainer, Path], name: str) -> None:
    trainer, path = saved
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-10])
    with pytest.raises(RollartError, match=f"incomplete: {name} has {len(content) - 10} bytes instead of"):
        load_checkpoint(trainer, path)
    (path / name).unlink()
    with pytest.raises(RollartError, match=f"incomplete: {name} is missing"):
        load_checkpoint(trainer, path)


def test_a_folder_without_a_manifest_and_no_folder_are_refused(saved: tuple[Trainer, Path], folder: Path) -> None:
    trainer, path = saved
    with pytest.raises(RollartError, match=r"it has no checkpoint\.json"):
        load_checkpoint(trainer, folder)
    with pytest.raises(RollartError, match="it does not exist"):
        load_checkpoint(trainer, path / "nothing")


def test_a_checkpoint_of_another_model_is_refused(saved: tuple[Trainer, Path], tmp_path: Path) -> None:
    other = Trainer(save_tiny(tmp_path / "other", hidden_size=16), CONFIG)
    with pytest.raises(RollartError, match="is of another model"):
        load_checkpoint(other, saved[1])


def test_a_kl_cannot_be_added_on_resume(folder: Path, tmp_path: Path) -> None:
    save_checkpoint(Trainer(folder, TrainingConfig()), tmp_path / "plain")
    with pytest.raises(RollartError, match="has no reference policy"):
        load_checkpoint(Trainer(folder, CONFIG), tmp_path / "plain")
