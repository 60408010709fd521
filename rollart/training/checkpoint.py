"""Checkpoints: a folder that is complete or does not exist.

It is a Hugging Face folder, tokenizer included, that can be used as it is. Next to the model it holds

    optimizer.safetensors    Adam's moments, by parameter name
    reference.safetensors    the policy at the start of RL, if the loss has a KL to it
    checkpoint.json          counters, reward ranges, the state of the numerics guard, and the size of every other file

It is written under a temporary name, flushed to disk, and renamed. Nothing in it is pickled.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.core.errors import RollartError
from rollart.models.folder import atomic_folder
from rollart.training.advantages import UNSEEN, RewardRange
from rollart.training.client import MANIFEST, OPTIMIZER, REFERENCE
from rollart.training.guard import GuardState
from rollart.training.learner import Restore, TensorKind
from rollart.training.optimizers import MOMENTS, moments
from rollart.training.policy import PolicyModel
from rollart.training.trainer import Trainer


class CheckpointManifest(msgspec.Struct):
    version: int
    updates: int
    ranges: dict[str, RewardRange]
    files: dict[str, int]
    guard: GuardState = GuardState()


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Replaces a checkpoint that is already at `path`."""
    learner = trainer.learner
    with atomic_folder(path) as folder:
        learner.policy.save(folder, trainer.gather("policy"))
        state = {f"{name}/step": torch.tensor(step) for name, step in learner.steps().items()}
        for kind in MOMENTS:
            state |= {f"{name}/{kind}": tensor for name, tensor in trainer.gather(kind).items()}
        save_file(state, folder / OPTIMIZER)
        if learner.reference is not None:
            save_file(trainer.gather("reference"), folder / REFERENCE)
        ranges = {task: seen for task, seen in trainer.ranges.items() if seen != UNSEEN}
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != MANIFEST}
        manifest = CheckpointManifest(trainer.version, learner.updates, ranges, sizes, trainer.guard.state())
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Raises RollartError, and leaves the trainer as it is, if the checkpoint is damaged or does not fit."""
    manifest = read_manifest(path)
    state = load_file(path / OPTIMIZER)
    stored: dict[TensorKind, Mapping[str, Tensor]] = {"policy": PolicyModel(path).parameters()}
    if trainer.learner.reference is not None:
        if REFERENCE not in manifest.files:
            raise RollartError(f"{path} has no reference policy; set training.algorithm.kl to 0 to continue")
        stored["reference"] = load_file(path / REFERENCE)
    updated = [name for name in stored["policy"] if f"{name}/step" in state]
    for kind in MOMENTS:
        stored[kind] = {name: state[f"{name}/{kind}"] for name in updated if f"{name}/{kind}" in state}
    _check_shapes(trainer, stored, updated, path)
    steps = {name: state[f"{name}/step"].item() for name in updated}
    trainer.restore(Restore(manifest.updates, steps), stored)
    trainer.version, trainer.ranges = manifest.version, manifest.ranges
    trainer.guard.restore(manifest.guard)


def read_manifest(path: Path) -> CheckpointManifest:
    """The manifest of the checkpoint at `path`. Raises RollartError if the checkpoint is incomplete."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=CheckpointManifest)
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if path.is_dir() else "does not exist"
        raise RollartError(f"the checkpoint {path} cannot be used: it {what}") from None
    except msgspec.DecodeError as error:
        raise RollartError(f"{path / MANIFEST} is damaged ({error}); use an older checkpoint") from error
    for name, size in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            fault = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise RollartError(f"the checkpoint {path} is incomplete: {name} {fault}; use an older checkpoint")
    return manifest


def _check_shapes(
    trainer: Trainer, stored: Mapping[TensorKind, Mapping[str, Tensor]], updated: Sequence[str], path: Path
) -> None:
    for name, parameter in trainer.learner.policy.parameters().items():
        wrong = {kind for kind, known in stored.items() if name not in known or known[name].shape != parameter.shape}
        if "policy" in wrong:
            raise RollartError(f"the checkpoint {path} is of another model: {name} is missing or has another shape")
        if "reference" in wrong:
            raise RollartError(f"the checkpoint {path} is damaged: {name} in {REFERENCE} does not fit")
        if name in updated and (lacking := wrong.intersection(moments(trainer.learner.optimizer, parameter))):
            raise RollartError(
                f"the checkpoint {path} was written with another training.optimizer, or is damaged: "
                f"{min(lacking)} of {name} in {OPTIMIZER} is missing or does not fit"
            )
