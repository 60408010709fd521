"""From a checkpoint to a Hugging Face folder: `python -m rollart.training.export CHECKPOINT FOLDER`.

The tensors get the names that the model has on disk, a mixture's experts one by one, so that `from_pretrained`, vLLM
and others load the folder. Only one decoder layer and the file that is being filled are in memory.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from rollart.core.errors import RollartError
from rollart.models.folder import atomic_folder, check_space
from rollart.training.block_files import FILES, BlockReader
from rollart.training.checkpoint import read_manifest
from rollart.training.client import MANIFEST
from rollart.training.learner import POLICY

FILE_BYTES = 2_000_000_000
INDEX = "model.safetensors.index.json"
LAYER = re.compile(r"(.*?\.\d+)\.")


def export_model(checkpoint: Path, folder: Path, dtype: str = "float32") -> None:
    """Write the policy of a checkpoint. Replaces a folder that is there. Raises RollartError."""
    read_manifest(checkpoint)
    kind: torch.dtype = getattr(torch, dtype)
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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint, local_files_only=True))
    layers: dict[str, list[str]] = {}
    for name in names:
        found = LAYER.match(name)
        layers.setdefault(found[1] if found else name, []).append(name)
    for layer in layers.values():
        whole = {name.removeprefix(f"{POLICY}/"): reader.whole(name) for name in layer}
        cast = {name: value.to(kind) if value.is_floating_point() else value for name, value in whole.items()}
        yield {name: value.contiguous() for name, value in revert_weight_conversion(model, cast).items()}


def _write_weights(folder: Path, layers: Iterable[dict[str, Tensor]]) -> None:
    index: dict[str, str] = {}
    held: dict[str, Tensor] = {}
    total = files = 0

    def flush() -> None:
        nonlocal files
        files += 1
        name = f"model-{files:05d}.safetensors"
        save_file(held, folder / name, {"format": "pt"})
        index.update(dict.fromkeys(held, name))
        held.clear()

    for layer in layers:
        held |= layer
        total += sum(value.nbytes for value in layer.values())
        if sum(value.nbytes for value in held.values()) >= FILE_BYTES:
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
        if file.name != MANIFEST and not file.match(FILES):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_bytes())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")


if __name__ == "__main__":
    try:
        export_model(Path(sys.argv[1]), Path(sys.argv[2]))
    except RollartError as error:
        sys.exit(str(error))
