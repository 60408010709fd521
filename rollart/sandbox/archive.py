"""Texts and files as a tar archive for a sandbox. Standard library only."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

OWNER = 1000  # the user in the sandbox


def archive(files: dict[str, str]) -> bytes:
    """The same files give the same bytes. Those that end in `.sh` are executable."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, text in sorted(files.items()):
            content = text.encode(errors="replace")
            entry = tarfile.TarInfo(name)
            entry.size, entry.uid, entry.gid = len(content), OWNER, OWNER
            entry.mode = 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def archive_paths(paths: Iterable[tuple[Path, str]]) -> bytes:
    """Files and whole folders of this machine, each with its path in the work folder."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path, name in paths:
            tar.add(path, name, filter=_set_owner)
    return made.getvalue()


def _set_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = OWNER
    return entry
