import fcntl
import threading
from pathlib import Path

import pytest
from run_locks import lock_held

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


def test_a_folder_has_a_controller_until_that_process_is_killed(tmp_path: Path) -> None:
    assert run_folder.has_controller(tmp_path) is None
    with lock_held(tmp_path) as process:
        assert run_folder.has_controller(tmp_path) is True
        with pytest.raises(RollartError, match="another process is already training"), run_folder.exclusive(tmp_path):
            pytest.fail("two processes work in one folder")
        assert not run_folder.was_killed(tmp_path)
        process.kill()
        process.wait(30)
        assert run_folder.has_controller(tmp_path) is False
        assert run_folder.was_killed(tmp_path)
    with run_folder.exclusive(tmp_path):
        assert run_folder.has_controller(tmp_path) is True
        assert not run_folder.was_killed(tmp_path)
    assert run_folder.has_controller(tmp_path) is False
    assert not run_folder.was_killed(tmp_path)


def test_a_glance_at_the_lock_does_not_keep_a_controller_out(tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        timer = threading.Timer(0.1, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        with run_folder.exclusive(tmp_path):
            timer.join()
            assert run_folder.has_controller(tmp_path) is True
