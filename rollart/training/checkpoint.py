"""Checkpoints: a folder that is whole or is not there.

It is a Hugging Face folder, tokenizer included, that can be used as it is, and beside the model holds

    optimizer.safetensors    Adam's moments, by parameter name
    reference.safetensors    the policy at the start of RL, if the loss has a KL to it
    checkpoint.json          counters, reward ranges, and the size of every other file

It is written beside its place, flushed to disk, and renamed. Nothing in it is pickled.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollart.errors import RollartError
from rollart.models.folder import whole_folder
from rollart.training.advantages import UNSEEN, RewardRange
from rollart.training.layout import MANIFEST, OPTIMIZER, REFERENCE
from rollart.training.policy import Policy
from rollart.training.trainer import Trainer

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Manifest(msgspec.Struct):
    version: int
    updates: int
    ranges: dict[str, RewardRange]
    files: dict[str, int]


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """A checkpoint that is already at `path` is replaced."""
    with whole_folder(path) as folder:
        trainer.policy.save(folder)
        save_file(_moments(trainer), folder / OPTIMIZER)
        if trainer.reference is not None:
            save_file(dict(trainer.reference.parameters()), folder / REFERENCE)
        ranges = {task: seen for task, seen in trainer.ranges.items() if seen != UNSEEN}
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != MANIFEST}
        manifest = msgspec.json.encode(Manifest(trainer.version, trainer.updates, ranges, sizes))
        (folder / MANIFEST).write_bytes(msgspec.json.format(manifest))


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Put `trainer` where it was. Raises RollartError, and leaves the trainer as it is, if anything is amiss."""
    manifest = read_manifest(path)
    weights = Policy(path).parameters()
    moments = load_file(path / OPTIMIZER)
    _check_shapes(trainer, weights, moments, path)
    if trainer.reference is not None:
        if REFERENCE not in manifest.files:
            raise RollartError(f"{path} was saved without a reference policy; set training.algorithm.kl to 0 to go on")
        _copy(load_file(path / REFERENCE), trainer.reference)
    _copy(weights, trainer.policy)
    trainer.optimizer.state.clear()
    for name, parameter in trainer.policy.parameters().items():
        state = {kind: moments[f"{name}/{kind}"] for kind in MOMENTS if f"{name}/{kind}" in moments}
        if state:
            trainer.optimizer.state[parameter] = state
    trainer.version, trainer.updates, trainer.ranges = manifest.version, manifest.updates, manifest.ranges


def read_manifest(path: Path) -> Manifest:
    """Check that the checkpoint at `path` is whole and return what it says about itself."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if path.is_dir() else "is not there"
        raise RollartError(f"the checkpoint {path} cannot be used: it {what}") from None
    except msgspec.DecodeError as error:
        raise RollartError(f"{path / MANIFEST} is damaged ({error}); use an older checkpoint") from error
    for name, size in manifest.files.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            fault = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise RollartError(f"the checkpoint {path} is incomplete: {name} {fault}; use an older checkpoint")
    return manifest


def _moments(trainer: Trainer) -> dict[str, Tensor]:
    return {
        f"{name}/{kind}": value
        for name, parameter in trainer.policy.parameters().items()
        for kind, value in trainer.optimizer.state.get(parameter, {}).items()
    }


def _copy(tensors: Mapping[str, Tensor], policy: Policy) -> None:
    for name, parameter in policy.parameters().items():
        parameter.data.copy_(tensors[name])


def _check_shapes(trainer: Trainer, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], path: Path) -> None:
    for name, parameter in trainer.policy.parameters().items():
        if name not in weights or weights[name].shape != parameter.shape:
            raise RollartError(f"the checkpoint {path} is of another model: {name} is missing or of another shape")
        for kind in MOMENTS[1:]:
            moment = moments.get(f"{name}/{kind}")
            if moment is not None and moment.shape != parameter.shape:
                raise RollartError(f"the checkpoint {path} is damaged: {kind} of {name} in {OPTIMIZER} does not fit")
