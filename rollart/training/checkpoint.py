"""Checkpoints: a folder that is complete or does not exist.

It holds

    rank-00000.safetensors    the blocks of each rank: weights and the optimizer's moments (`block_files`); with LoRA
                              those of the adapters alone, and the manifest names the model that they belong to
    checkpoint.json           counters, reward ranges, the state of the numerics guard, and the size of every other file
    config.json, tokenizer... the other files of the model's folder

Any other layout and number of ranks can load it, each rank only its part; `export` turns it into a Hugging Face folder.
Only the copy to host memory holds up training: a thread on each rank writes its file into a folder under a temporary
name, and rank 0 adds the manifest when all are written, flushes everything to disk and renames. Nothing is pickled.
"""

import shutil
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec
from torch import distributed

from rollart.core.errors import RollartError
from rollart.models.folder import begin_folder, check_space, commit_folder
from rollart.training.advantages import UNSEEN, RewardRange
from rollart.training.block_files import BlockReader
from rollart.training.client import MANIFEST
from rollart.training.guard import GuardState
from rollart.training.learner import Learner, Restore, Save, Verify
from rollart.training.trainer import Trainer
from rollart.weights.publish import new_id


class CheckpointFailed(RollartError):
    """A checkpoint could not be written. Training can go on, and older checkpoints are as they were."""


class CheckpointAdapters(msgspec.Struct, frozen=True):
    """What the weights of a checkpoint are added to, and how: those of `base`, a Hugging Face folder."""

    base: str
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class CheckpointManifest(msgspec.Struct):
    """`steps` of the optimizer by parameter. `lora`: its weights are adapters. `critic`: the updates of the critic."""

    version: int
    updates: int
    steps: dict[str, float]
    ranges: dict[str, RewardRange]
    guard: GuardState = GuardState()
    files: dict[str, int] = {}
    lora: CheckpointAdapters | None = None
    critic: int | None = None


def save_checkpoint(trainer: Trainer, path: Path) -> Future[None]:
    """Returns when the state is copied; the result is there when the checkpoint is complete, in place of one that was
    at `path`. Waits for the checkpoint before it. Raises CheckpointFailed, as the result does."""
    if trainer.saving is not None:
        wait([trainer.saving])
    learner = trainer.learner
    try:
        check_space(path, sum(model.size() for model in learner.models()))
        draft = begin_folder(path)
    except (OSError, RollartError) as error:
        raise CheckpointFailed(f"the checkpoint {path} could not be written: {error}") from error
    ranges = {task: seen for task, seen in trainer.ranges.items() if seen != UNSEEN}
    manifest = CheckpointManifest(
        version=trainer.version,
        updates=learner.state.updates,
        steps={name: steps for model in learner.models() for name, steps in model.steps().items()},
        critic=None if learner.critic is None else learner.critic.state.updates,
        ranges=ranges,
        guard=trainer.guard.state(),
        lora=_adapters(learner),
    )
    order = Save(str(draft), new_id())
    trainer.save(order)
    # After rank 0's own file, in the same thread.
    trainer.saving = learner.disk.submit(_finish, trainer, manifest, order, path)
    return trainer.saving


def _adapters(learner: Learner) -> CheckpointAdapters | None:
    lora = learner.config.lora
    return None if lora is None else CheckpointAdapters(str(learner.folder.absolute()), lora.rank, lora.alpha)


def _finish(trainer: Trainer, manifest: CheckpointManifest, order: Save, path: Path) -> None:
    draft = Path(order.folder)
    try:
        if faults := [fault for fault in trainer.ranks.collect(order.id) if fault]:
            raise OSError("; ".join(faults))
        for name, content in trainer.learner.policy.companions.items():
            (draft / name).write_bytes(content)
        manifest.files = {file.name: file.stat().st_size for file in sorted(draft.iterdir())}
        (draft / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
        commit_folder(draft, path)
    except (OSError, distributed.DistError) as error:
        raise CheckpointFailed(f"the checkpoint {path} could not be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Raises RollartError, and leaves the trainer as it is, if the checkpoint is damaged or does not fit."""
    manifest = read_manifest(path)
    with BlockReader(path) as reader:
        _check_fits(trainer.learner, reader, manifest, path)
    if faults := trainer.verify(Verify(str(path), new_id())):
        raise RollartError(f"{faults[0]}; use an older checkpoint")
    trainer.restore(Restore(str(path), manifest.updates, manifest.steps, manifest.critic or 0))
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


def _check_fits(learner: Learner, reader: BlockReader, manifest: CheckpointManifest, path: Path) -> None:
    """From the headers alone: nothing is read yet."""
    if damaged := next(reader.incomplete(), None):
        raise RollartError(f"the checkpoint {path} is damaged: {damaged} is not complete; use an older checkpoint")
    own, other = _adapters(learner), manifest.lora
    if (own and (own.rank, own.alpha)) != (other and (other.rank, other.alpha)):
        with_what = f"training.lora: {{rank: {other.rank}, alpha: {other.alpha:g}}}" if other else "no training.lora"
        raise RollartError(f"the checkpoint {path} was written with {with_what}; resume with the same")
    if learner.critic is not None and manifest.critic is None:
        raise RollartError(f"the checkpoint {path} has no critic; resume with the advantage that it was written with")
    for name, what, shape in (each for model in learner.models() for each in model.shapes(manifest.steps)):
        if reader.shapes.get(name) == shape:
            continue
        if what == "model":
            name = name.partition("/")[2]
            raise RollartError(f"the checkpoint {path} is of another model: {name} is missing or has another shape")
        kind, _, name = name.partition("/")
        raise RollartError(
            f"the checkpoint {path} was written with another training.optimizer, or is damaged: "
            f"{kind} of {name} is missing or does not fit"
        )
