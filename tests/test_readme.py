"""The files that the README and the tutorial ask a reader to write work as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.config import TinyModelConfig
from rollart.models import tiny

ROOT = Path(__file__).parents[1]
COMMAND = str(Path(sys.executable).with_name("rollart"))
SMALL = ("training.steps=1", "training.batch_groups=2", "training.group_size=2", "evaluation.final_episodes=2")


def snippets(page: str) -> dict[str, str]:
    """Code blocks whose first line names their file."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return dict(blocks)


def write(page: str, folder: Path) -> None:
    for name, text in snippets(page).items():
        (folder / name).write_text(text)


def rollart(folder: Path, *arguments: str) -> str:
    ended = subprocess.run([COMMAND, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def settings(*keys: str) -> list[str]:
    return [part for key in keys for part in ("--set", key)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small model where the README expects the pretrained one."""
    config = TinyModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, context=1024)
    tiny.make(config, tmp_path / "models" / "smollm2-135m", seed=0)
    return tmp_path


@pytest.mark.slow
def test_the_environment_of_the_readme_trains(folder: Path) -> None:
    write("README.md", folder)
    rollart(folder, "train", "parity.yaml", *settings(*SMALL))
    assert (folder / "runs" / "parity-1" / "model" / "config.json").is_file()


@pytest.mark.slow
def test_the_agent_of_the_readme_trains_in_place_of_the_environment(folder: Path) -> None:
    write("README.md", folder)
    run = (folder / "parity.yaml").read_text()
    assert 'env: "parity:Parity"' in run
    (folder / "parity.yaml").write_text(run.replace('env: "parity:Parity"', 'agent: "my_agent:solve"'))
    rollart(folder, "train", "parity.yaml", *settings(*SMALL))


@pytest.mark.slow
def test_the_task_of_the_tutorial_trains(tmp_path: Path) -> None:
    write("docs/tutorial.md", tmp_path)
    assert "echo" in rollart(tmp_path, "check", "echo.yaml")
    rollart(tmp_path, "train", "echo.yaml", *settings(*SMALL))


def test_the_mistake_of_the_tutorial_is_one_sentence_with_its_line(tmp_path: Path) -> None:
    write("docs/tutorial.md", tmp_path)
    run = tmp_path / "echo.yaml"
    run.write_text(run.read_text().replace("group_size", "group_sise"))
    ended = subprocess.run([COMMAND, "check", "echo.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "echo.yaml:" in ended.stderr and "group_size" in ended.stderr


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text())
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_every_make_target_that_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"`make ([\w-]+)`|^make ([\w-]+)", text, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert [name for pair in targets for name in pair if name and f"\n{name}:" not in makefile] == []
