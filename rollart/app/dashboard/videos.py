"""Videos of episodes in a run folder. A request names one that is listed here, never a path."""

from pathlib import Path
from typing import Any

_TYPES = {".gif": "image/gif", ".mp4": "video/mp4"}
_MAX_BYTES = 64 << 20


def listed(run_folder: Path) -> list[dict[str, Any]]:
    """Names, with when they changed: an episode may be filmed again under the same name."""
    found = _found(run_folder)
    return [{"name": name, "changed": found[name].stat().st_mtime} for name in sorted(found)]


def file_of(run_folder: Path, name: str) -> tuple[Path, str]:
    """The file and its media type. Raises KeyError for a name that is not listed."""
    path = _found(run_folder)[name]
    return path, _TYPES[path.suffix]


def _found(run_folder: Path) -> dict[str, Path]:
    folder = run_folder / "videos"
    if folder.is_symlink() or not folder.is_dir():
        return {}
    return {path.name: path for path in folder.iterdir() if path.suffix in _TYPES and _is_small_file(path)}


def _is_small_file(path: Path) -> bool:
    return not path.is_symlink() and path.is_file() and path.stat().st_size <= _MAX_BYTES
