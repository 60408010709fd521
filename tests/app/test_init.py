"""`rollart init` writes projects whose tests pass and whose run files can be trained as they are."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.app.preflight import advice, load_run
from rollart.config import TinyModelConfig
from rollart.models import tiny

KINDS = ["env", "tools", "agent", "dataset"]


def make(kind: str, folder: Path) -> str:
    result = CliRunner().invoke(app, ["init", kind, str(folder)])
    assert result.exit_code == 0, result.output
    return result.output


def in_project(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_project_passes_its_own_tests_and_trains(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "my project"
    make(kind, folder)
    assert "NAME" not in (folder / "run.yaml").read_text()
    in_project(folder, "pytest", "-q", "-p", "no:cacheprovider")
    quick = ["training.steps=2", "model.warmup.steps=10", "evaluation.final_episodes=8", "evaluation.every=0"]
    in_project(folder, "rollart", "train", "run.yaml", *(word for change in quick for word in ("--set", change)))
    assert (folder / "runs" / "my-project-1" / "model" / "config.json").is_file()


def test_the_quickstart_is_the_one_of_the_examples(tmp_path: Path) -> None:
    make("quickstart", tmp_path / "quick")
    example = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    assert (tmp_path / "quick" / "run.yaml").read_text() == example.read_text()


def test_the_next_command_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "next:  cd 'my project' && rollart train run.yaml" in make("env", Path("my project"))
    monkeypatch.chdir(tmp_path / "my project")
    for file in Path.cwd().iterdir():
        file.unlink()
    assert "next:  rollart train run.yaml" in make("env", Path())


def test_a_dataset_comes_with_a_run_file_for_a_pretrained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("dataset", tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    tiny.make(TinyModelConfig(), Path("models/smollm2-135m"), seed=0)
    run = load_run(Path("pretrained.yaml"))
    assert (run.name, run.model.tiny, list(advice(run))) == ("mine-pretrained", None, [])


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    result = CliRunner().invoke(app, ["init", "env", str(tmp_path)])
    assert result.exit_code == 2 and "not an empty folder" in result.output
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
