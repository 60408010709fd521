"""The files of docs/tutorials.md work as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import rollart, settings, write

PAGE = "docs/tutorials.md"
SMALL = ("training.steps=1", "training.batch_groups=2", "training.group_size=2", "evaluation.final_episodes=2")
WARM = ("model.warmup.demonstrations=20", "model.warmup.steps=3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(PAGE, tmp_path)
    subprocess.run([sys.executable, "make_sums.py"], cwd=tmp_path, check=True, timeout=60)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("run", "more"), [("agent.yaml", ()), ("sums.yaml", WARM), ("library.yaml", WARM)])
def test_a_run_of_the_tutorials_trains(folder: Path, run: str, more: tuple[str, ...]) -> None:
    rollart(folder, "train", run, *settings(*SMALL, *more))
    name = run.removesuffix(".yaml")
    assert (folder / "runs" / f"{name}-1" / "model" / "config.json").is_file()
    assert name in rollart(folder, "show", f"runs/{name}-1")


@pytest.mark.slow
def test_the_player_of_the_tutorials_makes_a_call(folder: Path) -> None:
    shown = rollart(folder, "play", "library.yaml", "library", "--player", "scripted", "--seed", "3")
    assert "<tool_call>" in shown and "finished after 2 turns" in shown


@pytest.mark.slow
def test_the_cluster_of_the_tutorials_can_be_planned_and_launched(folder: Path) -> None:
    assert "H100" in rollart(folder, "check", "cluster.yaml", "--nodes", "nodes.yaml")
    rollart(folder, "launch", "slurm", "cluster.yaml", "-o", "job.sh")
    assert "#SBATCH" in (folder / "job.sh").read_text()
