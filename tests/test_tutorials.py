"""The files of docs/tutorials.md and docs/porting.md work as they stand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel
from test_docs import sections_of
from test_readme import ROOT, rollart, settings, write

from rollart.config import RunFile

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
    rollart(folder, "launch", "kubernetes", "cluster.yaml", "--image", "i", "--claim", "c", "-o", "job.yaml")
    assert "RayJob" in (folder / "job.yaml").read_text()


@pytest.mark.slow
def test_the_commands_that_read_a_run_work(folder: Path) -> None:
    rollart(folder, "train", "sums.yaml", *settings(*SMALL, *WARM))
    first = next(line for line in rollart(folder, "trajectory", "runs/sums-1").splitlines() if "-0000" in line).split()[
        0
    ]
    assert first in rollart(folder, "trajectory", "runs/sums-1", first)
    rollart(folder, "timeline", "runs/sums-1", "-o", "trace.json")
    assert json.loads((folder / "trace.json").read_text())
    assert "sums" in rollart(folder, "eval", "sums.yaml", "--model", "runs/sums-1/model", *settings(*SMALL))


@pytest.mark.slow
def test_the_run_file_of_the_porting_page_trains(tmp_path: Path) -> None:
    write("docs/porting.md", tmp_path)
    rows = [json.dumps({"question": f"{n}?", "answer": str(n)}) for n in range(40)]
    (tmp_path / "questions.jsonl").write_text("\n".join(rows))
    rollart(tmp_path, "train", "ported.yaml", *settings(*SMALL))
    assert (tmp_path / "runs" / "ported-1" / "model" / "config.json").is_file()


def test_the_keys_of_the_porting_page_exist() -> None:
    page = (ROOT / "docs" / "porting.md").read_text()
    tables = [row.split(" | ")[1] for row in page.splitlines() if row.startswith("| `")]
    named = [key for cell in tables for key in re.findall(r"`([\w.\[\]]+)[^`]*`", cell)]
    keys = [key for key in named if re.split(r"[.\[]", key)[0] in RunFile.model_fields]
    assert len(keys) > 40 and [key for key in keys if not _exists(re.sub(r"\[\]|\.NAME", "", key).split("."))] == []


def _exists(path: list[str]) -> bool:
    sections: list[type[BaseModel]] = [RunFile]
    for name in path:
        found = [section.model_fields[name].annotation for section in sections if name in section.model_fields]
        if not found:
            return False
        sections = [section for annotation in found for section in sections_of(annotation)]
    return True
