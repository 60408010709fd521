import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import on_ranks
from safetensors.torch import load_file
from tiny_models import make_batch, save_tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config import TrainingConfig
from rollart.core.errors import RollartError
from rollart.training import export
from rollart.training.checkpoint import save_checkpoint
from rollart.training.client import export_in_child, model_folder
from rollart.training.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.5], [1.0, 1.0]]


def trained(folder: Path, path: Path) -> Trainer:
    trainer = Trainer(folder, TrainingConfig())
    trainer.step(make_batch(0, REWARDS))
    save_checkpoint(trainer, path).result()
    return trainer


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_is_the_policy_as_transformers_loads_it(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = save_tiny(tmp_path / "model", architecture, tie_word_embeddings=tied)
    trainer = trained(folder, tmp_path / "checkpoint")
    export.export_model(tmp_path / "checkpoint", tmp_path / "export")
    made, found = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(found.values())
    weights = dict(made.named_parameters())
    for name, weight in trainer.gather().items():
        assert weights[name].dtype == torch.float32 and torch.equal(weights[name], weight)
    # The same names and shapes, on disk, as in the folder that training started from.
    before, after = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "export"))
    assert {name: value.shape for name, value in before.items()} == {name: value.shape for name, value in after.items()}
    assert {file.name for file in (tmp_path / "export").iterdir()} == {file.name for file in folder.iterdir()}


def test_a_large_model_is_several_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FILE_BYTES", 40_000)
    trainer = trained(save_tiny(tmp_path / "model", "qwen3_moe"), tmp_path / "checkpoint")
    export.export_model(tmp_path / "checkpoint", tmp_path / "export", "bfloat16")
    assert len([*(tmp_path / "export").glob("model-*.safetensors")]) == 2
    made, found = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(found.values()) and made.dtype == torch.bfloat16
    weights = dict(made.named_parameters())
    assert all(torch.equal(weights[name], weight.bfloat16()) for name, weight in trainer.gather().items())


def save(path: Path, trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.step(make_batch(0, REWARDS))
    save_checkpoint(trainer, path).result()
    return trainer.gather()


@pytest.mark.slow
def test_the_blocks_of_several_ranks_are_exported_whole(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen3_moe", tie_word_embeddings=False)
    config = TrainingConfig.model_validate({"parallel": {"tensor": 2, "expert": 4}})
    expected = on_ranks(4, folder, config, partial(save, tmp_path / "checkpoint"))
    export.export_model(tmp_path / "checkpoint", tmp_path / "export")
    weights = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "export").named_parameters())
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


@pytest.mark.slow
def test_a_checkpoint_is_used_like_a_model_folder(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    trained(folder, tmp_path / "checkpoint")

    async def body() -> None:
        async with model_folder(folder) as same:
            assert same == folder
        async with model_folder(tmp_path / "checkpoint") as made:
            assert made.name == "checkpoint"
            AutoModelForCausalLM.from_pretrained(made)
        assert not made.exists()
        (tmp_path / "checkpoint" / "rank-00000.safetensors").write_bytes(b"")
        with pytest.raises(RollartError, match=r"incomplete: rank-00000\.safetensors has 0 bytes"):
            await export_in_child(tmp_path / "checkpoint", tmp_path / "nothing")

    asyncio.run(body())


def test_the_command_exports_and_refuses_in_sentences(tmp_path: Path) -> None:
    trained(save_tiny(tmp_path / "model"), tmp_path / "run" / "checkpoints" / "000001")

    def call(*words: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["export", *map(str, words)])
        return done.exit_code, done.output

    assert call(tmp_path / "run", tmp_path / "export", "--dtype", "bfloat16")[0] == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "export").dtype == torch.bfloat16
    assert call(tmp_path / "run", tmp_path / "export") == (
        2,
        f"{tmp_path}/export is not empty; choose another folder\n",
    )
    assert "is neither a checkpoint nor" in call(tmp_path / "model", tmp_path / "other")[1]
    assert "--dtype is float32, bfloat16 or float16, not int8" in call(tmp_path, tmp_path, "--dtype", "int8")[1]
