"""From a checkpoint to a Hugging Face folder: `python -m rollart.training.export CHECKPOINT FOLDER`.

The tensors get the names that the model has on disk, a mixture's experts one by one, so that `from_pretrained`, vLLM
and others load the folder. Only one decoder layer and the file that is being filled are in memory. Adapters, of a
checkpoint or of a folder that has them alone, are merged into the weights of their base, or written as peft does.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rollart.core.errors import RollartError
from rollart.models import adapters
from rollart.models.adapters import LinearAdapter, adapters_of
from rollart.models.disk_names import DiskNames, cut
from rollart.models.folder import ADAPTER_CONFIG, atomic_folder, check_space, is_adapter, is_reward_model
from rollart.training.block_files import FILES, BlockReader, damaged
from rollart.training.checkpoint import CheckpointAdapters, CheckpointManifest, read_manifest
from rollart.training.client import MANIFEST
from rollart.training.learner import POLICY

FILE_BYTES = 2_000_000_000
INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"(.*?\.\d+)\.")


def export_model(checkpoint: Path, folder: Path, dtype: str = "float32", *, base: Path | None = None) -> None:
    """Write the policy of a checkpoint, or of a folder with an adapter alone. Replaces a folder that is there. `base`
    is where the model of an adapter is now, if it was moved. Raises RollartError."""
    kind: torch.dtype = getattr(torch, dtype)
    if (merge := _merge(checkpoint, base)) is not None:
        _export_merged(merge, folder, kind)
        return
    with BlockReader(checkpoint) as reader:
        sizes = {name: prod(shape) for name, shape in reader.shapes.items() if name.startswith(f"{POLICY}/")}
        try:
            check_space(folder, sum(sizes.values()) * kind.itemsize)
            with atomic_folder(folder) as draft:
                _write_weights(draft, _tensors(checkpoint, reader, list(sizes), kind))
                _copy_companions(checkpoint, draft, dtype)
        except (OSError, RollartError) as error:
            raise RollartError(f"{checkpoint} could not be exported to {folder}: {error}") from error


def _tensors(
    checkpoint: Path, reader: BlockReader, names: Iterable[str], kind: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """A layer at a time, under the names of the disk."""
    on_disk = DiskNames(_empty_model(checkpoint))
    layers: dict[str, list[str]] = {}
    for name in names:
        found = LAYER.match(name)
        layers.setdefault(found[1] if found else name, []).append(name)
    for layer in layers.values():
        tensors = {}
        for name in layer:
            whole = reader.whole(name)
            parts = on_disk.of(name.removeprefix(f"{POLICY}/"), whole.shape)
            for part, run, _ in cut(parts, whole.to(kind) if whole.is_floating_point() else whole, 0):
                tensors[part.name] = run.view(part.shape)
        yield tensors


def export_adapter(checkpoint: Path, folder: Path, dtype: str = "float32") -> None:
    """Write the adapter of a checkpoint alone, as peft does. Raises RollartError."""
    lora = _checked(checkpoint).lora
    if lora is None:
        raise RollartError(f"{checkpoint} has no adapter: its run trained all weights; export it without --adapter")
    tensors = {name: value.to(getattr(torch, dtype)) for name, value in _adapter_tensors(checkpoint).items()}
    pairs, head = adapters.split_head(tensors)
    targets = sorted({weight.split(".")[-2] for weight, _ in adapters_of(pairs, lora.scale)})
    config = adapters.peft_config(base=lora.base, rank=lora.rank, alpha=lora.alpha, targets=targets, scores=bool(head))
    try:
        with atomic_folder(folder) as draft:
            save_file(tensors, draft / adapters.WEIGHTS, {"format": "pt"})
            (draft / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise RollartError(f"{checkpoint} could not be exported to {folder}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Merge:
    """Adapters, by the name of the weight that each changes, and the `base` that has these weights. `companions` is the
    folder of the other files. `head`, if not empty, is that of a reward model, in place of the one for tokens."""

    base: Path
    companions: Path
    added: Mapping[str, LinearAdapter]
    head: Mapping[str, Tensor]


def _merge(source: Path, base: Path | None) -> _Merge | None:
    """None if `source` is a checkpoint with all weights."""
    if is_adapter(source):
        named, scale = adapters.read_config(source)
        tensors, around = load_file(source / adapters.WEIGHTS), source.absolute().parent
        companions = None
    else:
        lora: CheckpointAdapters | None = _checked(source).lora
        if lora is None:
            return None
        named, scale, companions = lora.base, lora.scale, source
        tensors, around = _adapter_tensors(source), source.absolute().parents[1]
    # The run folder may have been moved, and with it the model that its warmup made.
    places = [base] if base else [Path(named), around / Path(named).name]
    found = next((place for place in places if any(place.glob("*.safetensors"))), None)
    if found is None:
        raise RollartError(f"{source} belongs to the model in {places[0]}, which is not there; name it with --base")
    pairs, head = adapters.split_head(tensors)
    return _Merge(found, companions or found, dict(adapters_of(pairs, scale)), head)


def _checked(checkpoint: Path) -> CheckpointManifest:
    """The manifest of a checkpoint whose files are whole."""
    manifest = read_manifest(checkpoint)
    if fault := damaged(sorted(checkpoint.glob(FILES))):
        raise RollartError(f"{fault}; use an older checkpoint")
    return manifest


def _adapter_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """By their names in files."""
    with BlockReader(checkpoint) as reader:
        names = [name for name in reader.shapes if name.startswith(f"{POLICY}/")]
        return {adapters.file_name(name.removeprefix(f"{POLICY}/")): reader.whole(name) for name in names}


def _export_merged(merge: _Merge, folder: Path, kind: torch.dtype) -> None:
    try:
        size = sum(file.stat().st_size for file in merge.base.glob("*.safetensors"))
        check_space(folder, size)
        with atomic_folder(folder) as draft:
            _write_weights(draft, _merged_tensors(merge, kind))
            _copy_companions(merge.companions, draft, str(kind).removeprefix("torch."))
    except (OSError, RollartError) as error:
        raise RollartError(f"the adapters of {merge.base} could not be exported to {folder}: {error}") from error


def _merged_tensors(merge: _Merge, kind: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """One at a time, under the names of the disk."""
    names = DiskNames(_empty_model(merge.base))
    left = {names.of(weight, ())[0].name: adapter for weight, adapter in merge.added.items()}
    for path in sorted(merge.base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name in merge.head or (merge.head and name.startswith("lm_head.")):
                    continue
                value = file.get_tensor(name)
                if (adapter := left.pop(name, None)) is not None:
                    value = adapter.merged(value.float())
                yield {name: value.to(kind).contiguous() if value.is_floating_point() else value}
    if left:
        raise RollartError(f"{merge.base} has no {next(iter(left))}, which the adapter changes: it is another model")
    yield {name: value.to(kind) for name, value in merge.head.items()}


def _empty_model(folder: Path) -> Any:
    kind = AutoModelForSequenceClassification if is_reward_model(folder) else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(AutoConfig.from_pretrained(folder, local_files_only=True))


def _write_weights(folder: Path, layers: Iterable[dict[str, Tensor]]) -> None:
    index: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = files = filled = 0

    def flush() -> None:
        nonlocal files, filled
        files, filled = files + 1, 0
        name = f"model-{files:05d}.safetensors"
        save_file(held, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(held, name))
        held.clear()

    for layer in layers:
        held |= layer
        size = sum(value.nbytes for value in layer.values())
        total, filled = total + size, filled + size
        if filled >= FILE_BYTES:
            flush()
    if held:
        flush()
    if files == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
    (folder / INDEX).write_text(text + "\n")


def _copy_companions(checkpoint: Path, folder: Path, dtype: str) -> None:
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in (MANIFEST, INDEX) and file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


if __name__ == "__main__":
    try:
        export_model(Path(sys.argv[1]), Path(sys.argv[2]))
    except RollartError as error:
        sys.exit(str(error))
