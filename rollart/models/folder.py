"""Model folders in Hugging Face format, written whole or not at all."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def is_model(path: Path) -> bool:
    """Is there a model with its tokenizer in this folder?"""
    weights = any(path.glob("*.safetensors"))
    return weights and (path / "config.json").is_file() and (path / "tokenizer_config.json").is_file()


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside `path` that takes its place when the block ends well, and vanishes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield draft
        draft.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
