import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from forked_ranks import on_ranks
from safetensors import safe_open
from tiny_models import make_batch, save_tiny

from rollart.config import AlgorithmConfig, TrainingConfig
from rollart.core.errors import RollartError
from rollart.models.folder import begin_folder, check_space, read_seconds
from rollart.training.block_files import BlockReader
from rollart.training.checkpoint import CheckpointFailed, load_checkpoint, save_checkpoint
from rollart.training.export import export_model
from rollart.training.guard import GuardState
from rollart.training.learner import Save
from rollart.training.trainer import Trainer

REWARDS = [[1.0, 0.0, 0.5], [1.0, 1.0]]
CONFIG = TrainingConfig(algorithm=AlgorithmConfig(kl=0.05))
WEIGHTS = "rank-00000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "model")


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> tuple[Trainer, Path]:
    trainer = Trainer(folder, CONFIG)
    for step in range(3):
        trainer.step(make_batch(step, REWARDS, seed=step))
    path = tmp_path / "checkpoints" / "step-3"
    save_checkpoint(trainer, path).result()
    return trainer, path


def same(left: Path, right: Path) -> bool:
    """Whether two checkpoints hold exactly the same weights and moments, however they are divided."""
    with BlockReader(left) as one, BlockReader(right) as other:
        assert not [*one.incomplete(), *other.incomplete()]
        assert one.shapes == other.shapes
        return all(torch.equal(one.whole(name), other.whole(name)) for name in one.shapes)


def test_training_goes_on_exactly_as_if_it_had_not_stopped(saved: tuple[Trainer, Path], folder: Path) -> None:
    trainer, path = saved
    resumed = Trainer(folder, CONFIG)
    load_checkpoint(resumed, path)
    assert (resumed.version, resumed.learner.state.updates, resumed.ranges) == (
        trainer.version,
        trainer.learner.state.updates,
        trainer.ranges,
    )
    assert resumed.guard.state() == trainer.guard.state() != GuardState()
    for step in (3, 4):
        expected, got = (each.step(make_batch(step, REWARDS, seed=step)) for each in (trainer, resumed))
        assert got.values == expected.values
    for left, right in zip(trainer.snapshot()[1].values(), resumed.snapshot()[1].values(), strict=True):
        assert torch.equal(left, right)


def test_training_goes_on_while_the_files_are_written(saved: tuple[Trainer, Path], tmp_path: Path) -> None:
    """The disk is not free before the next step is over; what is written is the state before it."""
    trainer, path = saved
    stepped = threading.Event()
    trained = trainer.learner.disk.submit(lambda: stepped.wait(60))
    saving = save_checkpoint(trainer, tmp_path / "again")
    trainer.step(make_batch(3, REWARDS, seed=3))
    assert not saving.done() and not (tmp_path / "again").exists()
    stepped.set()
    saving.result()
    assert trained.result() and same(tmp_path / "again", path)


def test_a_checkpoint_holds_blocks_with_shapes_and_offsets_and_the_tokenizer_and_no_pickles(
    saved: tuple[Trainer, Path],
) -> None:
    trainer, path = saved
    assert "hello" in (path / "tokenizer_config.json").read_text()
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    with safe_open(path / WEIGHTS, "pt") as file:
        blocks = msgspec.json.decode(file.metadata()["blocks"])
        assert {name.partition("/")[0] for name in blocks} == {"policy", "exp_avg", "exp_avg_sq"}
        for name, weight in trainer.learner.policy.parameters().items():
            place = blocks[f"policy/{name}"]
            assert (place["shape"], place["offset"]) == (list(weight.shape), [0] * weight.ndim)
            assert torch.equal(file.get_tensor(f"policy/{name}"), weight)


def test_a_checkpoint_replaces_the_one_in_its_place(saved: tuple[Trainer, Path], folder: Path) -> None:
    trainer, path = saved
    trainer.step(make_batch(3, REWARDS))
    save_checkpoint(trainer, path).result()
    other = Trainer(folder, CONFIG)
    load_checkpoint(other, path)
    assert other.version == 4
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond that fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_leaves_the_old_checkpoint(saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    trainer.step(make_batch(3, REWARDS))
    fault = r"could not be written: rank 0: .*File too large"
    with files_of_at_most(4096), pytest.raises(CheckpointFailed, match=fault):
        save_checkpoint(trainer, path).result()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    load_checkpoint(trainer, path)
    assert trainer.version == 3


def test_a_disk_without_room_is_found_before_anything_is_written(
    saved: tuple[Trainer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, path = saved
    with pytest.raises(RollartError, match=r"needs 4.61e\+09 GB, but the disk of .* has .* GB left"):
        check_space(path / "not" / "there", 1 << 62)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointFailed, match=r"step-9 could not be written: it needs 0\.00\d+ GB"):
        save_checkpoint(trainer, path.with_name("step-9"))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
def test_a_trainer_killed_half_way_leaves_the_old_checkpoint(saved: tuple[Trainer, Path], folder: Path) -> None:
    trainer, path = saved
    process = multiprocessing.get_context("spawn").Process(target=_die_while_saving, args=(folder, path))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert (path.parent / f".{path.name}.part" / WEIGHTS).is_file()  # all but the manifest
    load_checkpoint(trainer, path)
    assert trainer.version == 3
    save_checkpoint(trainer, path).result()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def _die_while_saving(folder: Path, path: Path) -> None:
    trainer = Trainer(folder, CONFIG)
    trainer.save(Save(str(begin_folder(path)), "id"))
    trainer.learner.disk.submit(int).result()  # what comes after the file
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_missing_or_cut_file_is_named(saved: tuple[Trainer, Path], name: str) -> None:
    trainer, path = saved
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[:-10])
    with pytest.raises(RollartError, match=f"incomplete: {name} has {len(content) - 10} bytes instead of"):
        load_checkpoint(trainer, path)
    (path / name).unlink()
    with pytest.raises(RollartError, match=f"incomplete: {name} is missing"):
        load_checkpoint(trainer, path)


def test_a_damaged_file_is_a_sentence(saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    content = bytearray((path / WEIGHTS).read_bytes())
    content[100:120] = b"?" * 20
    (path / WEIGHTS).write_bytes(content)
    with pytest.raises(RollartError, match=f"{WEIGHTS} is damaged .*; use an older checkpoint"):
        load_checkpoint(trainer, path)
    (path / "checkpoint.json").write_text("{")
    with pytest.raises(RollartError, match=r"checkpoint\.json is damaged"):
        load_checkpoint(trainer, path)


def test_a_flipped_bit_inside_a_tensor_is_found_before_anything_is_loaded(saved: tuple[Trainer, Path]) -> None:
    trainer, path = saved
    content = bytearray((path / WEIGHTS).read_bytes())
    content[-5] ^= 1
    (path / WEIGHTS).write_bytes(content)
    before = {name: tensor.clone() for name, tensor in trainer.gather().items()}
    with pytest.raises(RollartError, match=rf"{WEIGHTS} is damaged: the contents of .* have changed.*; use an older"):
        load_checkpoint(trainer, path)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.gather().items())
    with pytest.raises(RollartError, match="have changed since they were written"):
        export_model(path, path.parent / "exported")


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


def test_the_reference_is_the_model_that_training_started_from(folder: Path, tmp_path: Path) -> None:
    """So a KL can be added when a run resumes."""
    plain = Trainer(folder, TrainingConfig())
    start = {name: weight.clone() for name, weight in plain.gather().items()}
    plain.step(make_batch(0, REWARDS))
    save_checkpoint(plain, tmp_path / "plain").result()
    resumed = Trainer(folder, CONFIG)
    load_checkpoint(resumed, tmp_path / "plain")
    assert resumed.learner.reference is not None
    for name, weight in resumed.learner.reference.parameters().items():
        assert torch.equal(weight, start[name])
    assert not torch.equal(resumed.gather()["model.embed_tokens.weight"], start["model.embed_tokens.weight"])


def test_the_deadline_to_start_grows_with_what_is_to_be_read(saved: tuple[Trainer, Path], folder: Path) -> None:
    sizes = [file.stat().st_size for place in (folder, saved[1]) for file in place.glob("*.safetensors")]
    assert read_seconds(folder, saved[1]) == pytest.approx(sum(sizes) / 50e6)


# Layouts

DENSE = [
    (2, {}),
    (2, {"tensor": 2}),
    (4, {"context": 2, "tensor": 2}),
    (4, {"tensor": 2}),
    (3, {}),
    (2, {"context": 2}),
]
MOE = [(2, {"expert": 2}), (4, {"tensor": 2, "expert": 4}), (4, {"expert": 2}), (4, {"context": 2, "expert": 4})]


def go_through(source: Path, target: Path, trainer: Trainer) -> int:
    load_checkpoint(trainer, source)
    save_checkpoint(trainer, target).result()
    return trainer.learner.state.updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "layouts"), [("qwen3", DENSE), ("qwen3_moe", MOE)], ids=["dense", "mixture of experts"]
)
def test_every_layout_loads_exactly_what_another_saved(
    tmp_path: Path, architecture: str, layouts: list[tuple[int, dict[str, Any]]]
) -> None:
    """From one rank through all layouts and back to one, weights and both moments."""
    folder = save_tiny(tmp_path / "model", architecture, tie_word_embeddings=architecture == "qwen3")
    trainer = Trainer(folder, TrainingConfig())
    for step in range(2):
        trainer.step(make_batch(step, REWARDS, seed=step))
    first = source = tmp_path / "one"
    save_checkpoint(trainer, first).result()
    for number, (ranks, parallel) in enumerate(layouts):
        config = TrainingConfig.model_validate({"parallel": parallel})
        target = tmp_path / str(number)
        assert on_ranks(ranks, folder, config, partial(go_through, source, target)) == 2
        assert len([*target.glob("rank-*.safetensors")]) == ranks
        assert same(first, target), (ranks, parallel)
        source = target
    resumed = Trainer(folder, TrainingConfig())
    load_checkpoint(resumed, source)
    assert resumed.step(make_batch(2, REWARDS)).values == trainer.step(make_batch(2, REWARDS)).values


@pytest.mark.slow
def test_a_file_of_one_rank_that_is_left_out_is_noticed(folder: Path, tmp_path: Path) -> None:
    start = tmp_path / "one"
    save_checkpoint(Trainer(folder, TrainingConfig()), start).result()
    on_ranks(2, folder, TrainingConfig(), partial(go_through, start, tmp_path / "two"))
    manifest = msgspec.json.decode((tmp_path / "two" / "checkpoint.json").read_bytes())
    del manifest["files"]["rank-00001.safetensors"]
    (tmp_path / "two" / "rank-00001.safetensors").unlink()
    (tmp_path / "two" / "checkpoint.json").write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(RollartError, match=r"is damaged: policy/.* is not complete"):
        load_checkpoint(Trainer(folder, TrainingConfig()), tmp_path / "two")
