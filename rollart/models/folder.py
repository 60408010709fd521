"""Model folders in Hugging Face format, written atomically."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from rollart.core.errors import RollartError

ADAPTER_CONFIG = "adapter_config.json"  # of peft
READ_BYTES_PER_S = 50e6  # a slow disk, or one that many processes share


def is_model(path: Path) -> bool:
    """Whether the folder has a model and its tokenizer."""
    weights = any(path.glob("*.safetensors"))
    return weights and (path / "config.json").is_file() and (path / "tokenizer_config.json").is_file()


def is_reward_model(folder: Path) -> bool:
    """Whether it has a head for one number in place of that for tokens."""
    try:
        about = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False
    return any(str(name).endswith("ForSequenceClassification") for name in about.get("architectures") or ())


def model_problem(path: Path) -> str:
    """Why a folder is no model, to end a sentence that begins with its name; empty if it is one."""
    if (path / "config.json").is_file():
        return ""
    return f"is not a Hugging Face model folder: it {'has no config.json' if path.exists() else 'is not there'}"


def is_adapter(path: Path) -> bool:
    """Whether the folder has an adapter alone, as peft writes it."""
    return (path / ADAPTER_CONFIG).is_file()


def read_seconds(*folders: Path) -> float:
    """A generous estimate of how long it takes to read the weights in these folders."""
    files = (file for folder in folders for file in folder.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / READ_BYTES_PER_S


def check_space(path: Path, size: int) -> None:
    """Raises RollartError if the disk of `path`, which need not exist yet, has no `size` bytes left."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise RollartError(f"it needs {size / 1e9:.3g} GB, but the disk of {there} has {free / 1e9:.3g} GB left")


def begin_folder(path: Path) -> Path:
    """An empty folder beside `path`, to be filled and committed as `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    for leftover in (draft, path.with_name(f".{path.name}.old")):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir()
    return draft


def commit_folder(draft: Path, path: Path) -> None:
    """Flush a draft to disk and rename it to `path`. An existing folder is moved away, not deleted, until then."""
    old = path.with_name(f".{path.name}.old")
    for entry in (*draft.rglob("*"), draft):
        _sync(entry)
    if path.exists():
        path.rename(old)
    draft.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder that becomes `path` when the block succeeds, and is deleted otherwise."""
    draft = begin_folder(path)
    try:
        yield draft
        commit_folder(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
