"""Model folders in Hugging Face format, written atomically."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_model(path: Path) -> bool:
    """Whether the folder has a model and its tokenizer."""
    weights = any(path.glob("*.safetensors"))
    return weights and (path / "config.json").is_file() and (path / "tokenizer_config.json").is_file()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder that is flushed to disk and renamed to `path` when the block succeeds, and deleted
    otherwise. An existing folder is moved away, not deleted, until the new one is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, old = (path.with_name(f".{path.name}.{kind}") for kind in ("part", "old"))
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        for entry in (*draft.rglob("*"), draft):
            _sync(entry)
        if path.exists():
            path.rename(old)
        draft.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
