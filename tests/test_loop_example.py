"""examples/loop.py is the page that the docs start from: it must run, stay short and really learn."""

import asyncio
import runpy
from pathlib import Path

import pytest

LOOP = Path(__file__).parents[1] / "examples" / "loop.py"


@pytest.mark.slow
def test_the_loop_example_learns_within_the_staleness_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = asyncio.run(runpy.run_path(str(LOOP))["train"](tmp_path))
    assert sum(rewards[:3]) / 3 < 0.1 and sum(rewards[-5:]) / 5 > 0.5
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rewards)
    assert all(0.0 <= float(line.split()[5]) <= 1.0 for line in lines)


def test_the_loop_example_fits_on_a_few_screens() -> None:
    assert len(LOOP.read_text().splitlines()) <= 200
