"""Adapters are all that is trained and kept; without them the policy is the model that it started from."""

import asyncio
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_batch, save_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config import TrainingConfig
from rollart.core.errors import RollartError
from rollart.hardware.training_memory import Decoder
from rollart.training.block_files import BlockReader
from rollart.training.checkpoint import load_checkpoint, save_checkpoint
from rollart.training.client import model_folder
from rollart.training.export import export_adapter, export_model
from rollart.training.packing import Packed, pack
from rollart.training.policy import PolicyModel
from rollart.training.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.5], [1.0, 0.0]]


def config(**more: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"lora": {"rank": 3, "alpha": 5}, "lr": 0.05, "lr_warmup": 0, **more})


def trained(folder: Path, path: Path, steps: int = 2, **more: Any) -> Trainer:
    trainer = Trainer(folder, config(**more))
    for step in range(steps):
        trainer.step(make_batch(step, REWARDS, seed=step))
    save_checkpoint(trainer, path).result()
    return trainer


def example() -> Packed:
    return pack([[1, 2, 3, 4, 5, 6], [7, 8, 9]], [[0, 1, 1, 1, 1, 1], [0, 1, 1]])


@torch.no_grad()
def logprobs(model: Any) -> Tensor:
    values: Tensor = model.logprobs(example())[0]
    return values


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
def test_new_adapters_change_nothing_and_trained_ones_can_be_switched_off(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny(tmp_path / "model", architecture)
    plain = logprobs(PolicyModel(folder))
    trainer = Trainer(folder, config())
    assert torch.equal(logprobs(trainer.learner.policy), plain)
    trainer.step(make_batch(0, REWARDS))
    base = trainer.learner.policy.base()
    assert base is not None and torch.equal(logprobs(base), plain)
    assert (logprobs(trainer.learner.policy) - plain).abs().max() > 1e-3


def test_only_adapters_have_gradients_moments_and_a_place_in_checkpoints(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    trainer = trained(folder, tmp_path / "checkpoint")
    model = trainer.learner.policy.model  # type: ignore[attr-defined]
    frozen = load_file(folder / "model.safetensors")
    kept = {name.replace(".base_layer", ""): value for name, value in model.named_parameters()}
    assert all(torch.equal(kept[name], value) and not kept[name].requires_grad for name, value in frozen.items())
    adapters = 2 * 7 * 2  # A and B of each linear layer of two decoder layers
    assert len(trainer.learner.state.optimizer.state) == len(trainer.learner.policy.parameters()) == adapters
    with BlockReader(tmp_path / "checkpoint") as reader:
        assert len(reader.shapes) == 3 * adapters and all(".lora_" in name for name in reader.shapes)


def test_the_reference_of_the_kl_is_the_model_without_adapters_and_no_second_copy(tmp_path: Path) -> None:
    folder, algorithm = save_tiny(tmp_path / "model"), {"kl": 0.1}
    trainer = trained(folder, tmp_path / "checkpoint", algorithm=algorithm)
    assert trainer.learner.reference is not None
    separate = Trainer(folder, config(algorithm=algorithm))
    load_checkpoint(separate, tmp_path / "checkpoint")
    separate.learner.reference = PolicyModel(folder, trained=False)
    one, other = (each.step(make_batch(2, REWARDS, seed=2)).values for each in (trainer, separate))
    assert one["kl"] > 0 and one == pytest.approx(other, rel=1e-6)


def test_a_resumed_trainer_goes_on_as_one_that_did_not_stop(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    trainer = trained(folder, tmp_path / "checkpoint")
    resumed = Trainer(folder, config(), seed=5)
    load_checkpoint(resumed, tmp_path / "checkpoint")
    for each in (trainer, resumed):
        each.step(make_batch(2, REWARDS, seed=2))
    left, right = trainer.gather(), resumed.gather()
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 5}, {"rank": 3, "alpha": 6}])
def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path, lora: Any) -> None:
    folder = save_tiny(tmp_path / "model")
    trained(folder, tmp_path / "checkpoint", steps=1)
    with pytest.raises(RollartError, match=r"written with training\.lora: \{rank: 3, alpha: 5\}; resume with the same"):
        load_checkpoint(Trainer(folder, config(lora=lora)), tmp_path / "checkpoint")


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_an_export_is_the_policy_merged_or_the_adapter_alone(tmp_path: Path, architecture: str) -> None:
    folder = save_tiny(tmp_path / "model", architecture)
    trainer = trained(folder, tmp_path / "checkpoint")
    export_model(tmp_path / "checkpoint", tmp_path / "merged")
    wanted = logprobs(trainer.learner.policy)
    assert torch.allclose(logprobs(PolicyModel(tmp_path / "merged")), wanted, atol=1e-5)
    assert {file.name for file in (tmp_path / "merged").iterdir()} == {file.name for file in folder.iterdir()}

    export_adapter(tmp_path / "checkpoint", tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in loaded.merge_and_unload().state_dict().items():
        assert name not in merged or torch.allclose(value, merged[name], atol=1e-6), name


@pytest.mark.slow
def test_an_adapter_is_used_like_a_model_folder(tmp_path: Path) -> None:
    trained(save_tiny(tmp_path / "model"), tmp_path / "run" / "checkpoints" / "000002")
    for words in (["adapter", "--adapter"], ["merged"]):
        command = ["export", tmp_path / "run", tmp_path / words[0], *words[1:]]
        assert CliRunner().invoke(app, [str(word) for word in command]).exit_code == 0

    async def body() -> None:
        async with model_folder(tmp_path / "adapter") as made:
            left, right = (load_file(place / "model.safetensors") for place in (made, tmp_path / "merged"))
            assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)

    asyncio.run(body())


def test_the_model_of_an_adapter_is_found_in_a_run_folder_that_was_moved(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    trained(save_tiny(run / "start"), run / "checkpoints" / "000002")
    run.rename(moved)
    export_model(moved / "checkpoints" / "000002", tmp_path / "merged")
    (moved / "start").rename(tmp_path / "elsewhere")
    with pytest.raises(RollartError, match=r"belongs to the model in .*/run/start, which is not there; name it with"):
        export_model(moved / "checkpoints" / "000002", tmp_path / "again")
    export_model(moved / "checkpoints" / "000002", tmp_path / "again", base=tmp_path / "elsewhere")
    left, right = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_of_all_weights_has_no_adapter(tmp_path: Path) -> None:
    trained(save_tiny(tmp_path / "model"), tmp_path / "checkpoint", lora=None)
    with pytest.raises(RollartError, match="has no adapter: its run trained all weights"):
        export_adapter(tmp_path / "checkpoint", tmp_path / "adapter")


def test_in_bfloat16_frozen_weights_take_half_the_memory_and_adapters_stay_float32(tmp_path: Path) -> None:
    trainer = Trainer(save_tiny(tmp_path / "model"), config(dtype="bfloat16"))
    model = trainer.learner.policy.model  # type: ignore[attr-defined]
    types = {(".lora_" in name, parameter.dtype) for name, parameter in model.named_parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    values = trainer.step(make_batch(0, REWARDS)).values
    assert values["grad_norm"] > 0 and not values.get("skipped")


def test_targets_are_chosen_by_name_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    some = PolicyModel(folder, config=config(lora={"targets": ["q_proj", "v_proj"]})).parameters()
    assert {name.split(".")[4] for name in some} == {"q_proj", "v_proj"} and len(some) == 2 * 2 * 2
    with pytest.raises(RollartError, match=r"no linear layer called c_attn; it has down_proj, gate_proj, k_proj"):
        PolicyModel(folder, config=config(lora={"targets": ["q_proj", "c_attn"]}))


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("targets", ["all", ["q_proj", "o_proj"]])
def test_the_memory_model_counts_the_adapters_that_are_trained(tmp_path: Path, architecture: str, targets: Any) -> None:
    folder = save_tiny(tmp_path / "model", architecture)
    policy = PolicyModel(folder, config=config(lora={"rank": 3, "targets": targets}))
    decoder = Decoder.of(json.loads((folder / "config.json").read_text()))
    counted = decoder.adapters(3, None if targets == "all" else targets)
    assert counted == sum(parameter.numel() for parameter in policy.parameters().values())


@pytest.mark.parametrize("split", [{"tensor": 2}, {"expert": 2}])
def test_adapters_are_refused_with_tensor_and_expert_parallelism(split: dict[str, int]) -> None:
    with pytest.raises(
        ValueError, match=rf"lora trains on data and context parallel ranks, but parallel\.{next(iter(split))}"
    ):
        config(parallel=split)
