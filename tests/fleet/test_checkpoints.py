from pathlib import Path

import pytest

from rollart.core.errors import RollartError
from rollart.core.events import Evaluated
from rollart.fleet.checkpoints import Checkpoints, find_checkpoint


def result(version: int, success: float, reward: float = 0.0, task: str = "a") -> Evaluated:
    return Evaluated(version=version, task=task, episodes=8, success=success, reward=reward, failed=0)


def write(checkpoints: Checkpoints, *versions: int) -> None:
    for version in versions:
        checkpoints.path(version).mkdir(parents=True)
        (checkpoints.path(version) / "checkpoint.json").write_text("{}")
        checkpoints.commit(version)


def test_the_newest_are_kept_and_those_of_a_discarded_history_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 10, 20, 30)
    assert checkpoints.versions() == [20, 30]
    checkpoints.start(20)
    write(checkpoints, 25)
    assert checkpoints.versions() == [20, 25]


def test_the_best_by_evaluation_is_kept_too(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, best=True)
    for version, success, reward in ((10, 0.5, 1.0), (20, 0.75, 0.0), (30, 0.75, -1.0), (40, 0.5, 9.0)):
        write(checkpoints, version)
        checkpoints.evaluated(version, [result(version, success, reward)])
    assert checkpoints.versions() == [20, 40]
    best = Checkpoints(tmp_path, keep=1, best=True).best()  # as a resumed run finds it
    assert best is not None and (best.version, best.success) == (20, 0.75)
    checkpoints.evaluated(47, [result(47, 1.0, task="a"), result(47, 0.5, 0.5, task="b")])
    write(checkpoints, 50)
    assert checkpoints.versions() == [40, 50]


def test_a_checkpoint_stays_until_its_evaluation_is_over(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, best=True)
    with checkpoints.evaluating(20):  # version 20 is written and evaluated at the same time
        write(checkpoints, 10, 20, 30, 40)
        assert checkpoints.versions() == [20, 40]
        checkpoints.evaluated(20, [result(20, 0.1)])
    write(checkpoints, 50)
    assert checkpoints.versions() == [20, 50]
    checkpoints.evaluated(50, [result(50, 0.1)])  # as good, and later
    write(checkpoints, 60)
    assert checkpoints.versions() == [50, 60]


def test_an_evaluation_before_any_checkpoint_counts_for_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, best=True)
    checkpoints.evaluated(0, [result(0, 1.0)])
    write(checkpoints, 10)
    checkpoints.evaluated(9, [result(9, 1.0)])
    assert checkpoints.best() is None


def test_an_evaluation_that_ends_before_its_checkpoint_is_written_counts_for_that_one(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, best=True)
    write(checkpoints, 10)
    checkpoints.evaluated(20, [result(20, 1.0)])
    write(checkpoints, 20, 30)
    best = checkpoints.best()
    assert best is not None and (best.version, best.evaluated) == (20, 20)
    assert checkpoints.versions() == [20, 30]


def test_what_a_killed_run_was_writing_goes(tmp_path: Path) -> None:
    (tmp_path / ".000010.part").mkdir()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.start(0)
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_is_found_by_its_folder_or_by_its_run(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, best=True)
    with pytest.raises(RollartError, match="neither a checkpoint nor the folder of a run"):
        find_checkpoint(tmp_path)
    write(checkpoints, 10)
    with pytest.raises(RollartError, match=r"no best checkpoint; a run keeps one with checkpoint\.best: true"):
        find_checkpoint(tmp_path, best=True)
    checkpoints.evaluated(10, [result(10, 1.0)])
    write(checkpoints, 20)
    assert find_checkpoint(tmp_path) == find_checkpoint(checkpoints.path(20)) == checkpoints.path(20)
    assert find_checkpoint(tmp_path, best=True) == checkpoints.path(10)
    (checkpoints.folder / "best.json").write_text("?")
    with pytest.raises(RollartError, match=r"best\.json is damaged"):
        find_checkpoint(tmp_path, best=True)
