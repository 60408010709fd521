"""What a sandbox can have beyond the usual."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.sandbox.bubble import Extras, SandboxError
from rollart.sandbox.shell import Sandbox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that everybody may enter."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        (Path(made) / "note").write_text("note")
        yield Path(made)


def test_a_seen_folder_is_there_read_only_and_nothing_beside_it(folder: Path) -> None:
    (folder / "deep").mkdir()
    with Sandbox(extras=Extras(seen=(str(folder / "deep"), str(folder)))) as sandbox:
        assert sandbox.run(f"cat {folder}/note").output == "note"
        assert "Read-only file system" in sandbox.run(f"touch {folder}/other {folder}/deep/other").output
        assert sandbox.run(f"ls {folder.parent}").output == f"{folder.name}\n"


def test_links_in_the_root_lead_into_the_work_folder_and_are_packed_with_it() -> None:
    extras = Extras(links=(("/app", "app"), ("/data", "other/data")))
    with Sandbox(extras=extras) as sandbox:
        sandbox.run("mkdir -p app other/data; echo one > /app/x; echo two > /data/y")
        work = sandbox.pack()
    with Sandbox(work, extras=extras) as sandbox:
        assert sandbox.run("cat /app/x /data/y; ln -s /task/app /mine").output.startswith("one\ntwo\nln: ")


def test_a_folder_that_cannot_be_seen_is_told(folder: Path) -> None:
    with pytest.raises(SandboxError, match="which is no folder"):
        Sandbox(extras=Extras(seen=(str(folder / "nowhere"),)))
    if os.geteuid() == 0:
        folder.chmod(0o700)
        (folder / "inner").mkdir()
        with pytest.raises(SandboxError, match=f"may not enter {folder}; move it"):
            Sandbox(extras=Extras(seen=(str(folder / "inner"),)))
