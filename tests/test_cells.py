"""Cells of a benchmark's table are made once, and those that the time did not allow are named."""

from pathlib import Path

from benchmarks.cells import Cells


def test_a_cell_is_made_once_and_found_again_by_its_settings(tmp_path: Path) -> None:
    first = Cells(tmp_path / "kept", "table")
    assert first.get(lambda: [0.5], seed=0, lr=0.1) == [0.5]
    again = Cells(tmp_path / "kept", "table")
    assert again.get(lambda: [0.7], lr=0.1, seed=0) == [0.5]
    assert again.get(lambda: [0.7], lr=0.1, seed=1) == [0.7]
    assert Cells(tmp_path / "kept", "other").get(lambda: [0.9], lr=0.1, seed=0) == [0.9]


def test_no_cell_is_made_after_the_time_is_up(tmp_path: Path) -> None:
    Cells(tmp_path, "table").get(lambda: 1, seed=0)
    late = Cells(tmp_path, "table", minutes=-1.0)
    assert late.get(lambda: 2, seed=0) == 1, "what is kept needs no time"
    assert late.get(lambda: 2, seed=1) is None
    assert late.missing == ['{"seed": 1}']
