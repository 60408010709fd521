from pathlib import Path

import pytest

from rollart.core import run_folder
from rollart.core.errors import RollartError


def test_folders_are_numbered_from_one_and_never_reused(tmp_path: Path) -> None:
    assert run_folder.create(tmp_path / "runs", "a").name == "a-1"
    assert run_folder.create(tmp_path / "runs", "a").name == "a-2"
    (tmp_path / "runs" / "a-1").rmdir()
    assert run_folder.create(tmp_path / "runs", "a").name == "a-3"


def test_the_newest_is_the_highest_number_of_exactly_this_name(tmp_path: Path) -> None:
    for name in ("a-2", "a-10", "a-eval-11", "ab-12", "a-x", "a.-13"):
        (tmp_path / name).mkdir()
    (tmp_path / "a-99").write_text("a file")
    assert run_folder.newest(tmp_path, "a").name == "a-10"
    with pytest.raises(RollartError, match="holds no run of 'b'"):
        run_folder.newest(tmp_path, "b")
    with pytest.raises(RollartError, match="holds no run"):
        run_folder.newest(tmp_path / "nowhere", "a")
