"""Texts and files as a tar, which is how they get into a sandbox. Standard library only."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

OWNER = 1000  # the agent, in the sandbox


def archive(files: dict[str, str]) -> bytes:
    """The same files give the same bytes. Those that end in `.sh` can be executed."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, text in sorted(files.items()):
            content = text.encode(errors="replace")
            entry = tarfile.TarInfo(name)
            entry.size, entry.uid, entry.gid = len(content), OWNER, OWNER
            entry.mode = 0o755 if name.endswith(".sh") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def copied(paths: Iterable[tuple[Path, str]]) -> bytes:
    """Files and whole folders of this machine, each with its place in the work folder."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path, place in paths:
            tar.add(path, place, filter=_theirs)
    return made.getvalue()


def _theirs(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = OWNER
    return entry
