"""Folders of the host and links in a sandbox."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.sandbox.bubblewrap import ExtraMounts, SandboxError
from rollart.sandbox.shell import Sandbox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that all users may enter."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        (Path(made) / "note").write_text("note")
        yield Path(made)


def test_a_mounted_folder_is_read_only_and_its_siblings_are_not_visible(folder: Path) -> None:
    (folder / "deep").mkdir()
    with Sandbox(mounts=ExtraMounts(folders=(str(folder / "deep"), str(folder)))) as sandbox:
        assert sandbox.run(f"cat {folder}/note").output == "note"
        assert "Read-only file system" in sandbox.run(f"touch {folder}/other {folder}/deep/other").output
        assert sandbox.run(f"ls {folder.parent}").output == f"{folder.name}\n"


def test_links_in_the_root_lead_into_the_work_folder_and_are_packed_with_it() -> None:
    mounts = ExtraMounts(links=(("/app", "app"), ("/data", "other/data")))
    with Sandbox(mounts=mounts) as sandbox:
        sandbox.run("mkdir -p app other/data; echo one > /app/x; echo two > /data/y")
        work = sandbox.pack()
    with Sandbox(work, mounts=mounts) as sandbox:
        assert sandbox.run("cat /app/x /data/y; ln -s /task/app /mine").output.startswith("one\ntwo\nln: ")


def test_a_folder_that_cannot_be_mounted_is_an_error(folder: Path) -> None:
    with pytest.raises(SandboxError, match="which is not a folder"):
        Sandbox(mounts=ExtraMounts(folders=(str(folder / "nowhere"),)))
    if os.geteuid() == 0:
        folder.chmod(0o700)
        (folder / "inner").mkdir()
        with pytest.raises(SandboxError, match=f"may not enter {folder}; move it"):
            Sandbox(mounts=ExtraMounts(folders=(str(folder / "inner"),)))
