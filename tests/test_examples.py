"""Every run file and scenario that we ship can be loaded."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config import TinyModelConfig
from rollart.config.loading import load as load_run_file
from rollart.models import tiny
from rollart.robots.comparison import load as load_comparison
from rollart.robots.run import load as load_robot_run
from rollart.simulator.scenario import load as load_scenario

ROOT = Path(__file__).parents[1]
FILES = sorted(path for path in (ROOT / "examples").rglob("*.yaml") if "tasks" not in path.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_is_a_valid_run_file(path: Path) -> None:
    keys = yaml.safe_load(path.read_text())
    if path.parent.name == "robots":
        assert load_comparison(path, []).tasks if "policies" in keys else load_robot_run(path, []).task
        return
    run = load_scenario(path) if "simulate" in keys else load_run_file(path)
    assert run.tasks


HARDWARE = [path for path in FILES if path.parent.name in ("hardware", "scale")]


@pytest.mark.parametrize("run", HARDWARE, ids=lambda path: path.name)
def test_a_run_file_for_hardware_fits_its_nodes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    own, common = run.with_suffix(".nodes.json"), run.with_name("nodes.json")
    nodes = own if own.exists() else common
    checked = CliRunner().invoke(app, ["check", str(run), "--nodes", str(nodes)])
    assert checked.exit_code == 0, checked.output
    assert "Memory of each device" in checked.output


@pytest.mark.parametrize("path", HARDWARE, ids=lambda path: path.name)
def test_a_run_file_for_hardware_is_simulated_within_the_memory_of_its_devices(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    part = ["--set", "simulate.one_in=32"] if "235b" in path.name else []
    arguments = ["--set", "training.steps=2", "--set", "simulate.warmup=1", *part, "--draws", "0", "--json"]
    simulated = CliRunner().invoke(app, ["simulate", str(path), *arguments])
    assert simulated.exit_code == 0, simulated.output
    found = json.loads(simulated.stdout)
    assert 0 < found["step_s"] < 3600 and 0 < found["mfu"] < 1
    scenario = load_scenario(path)
    pools = scenario.pools_of("train") | scenario.pools_of("generate")
    rooms = {name: scenario.device_classes()[pool.devices[0]].memory for name, pool in pools.items()}
    assert found["memory"].keys() == rooms.keys(), "a GPU each"
    assert all(0 < used < rooms[name] for name, used in found["memory"].items())
    assert f"of {next(iter(rooms.values())):g}" in simulated.stderr and "step " in simulated.stderr


def test_the_hardware_people_have_is_there_and_said_to_be_untried() -> None:
    said = " ".join(path.read_text().splitlines()[0] for path in HARDWARE)
    for kind in ("one GPU", "8 H100: 4 train, 4 generate", "16 H800 train, 16 H20 generate", "235B-A22B"):
        assert kind in said
    assert all("Never run on" in path.read_text().split("\nname:")[0] for path in HARDWARE)
    assert load_scenario(ROOT / "examples/hardware/one-gpu.yaml").training.lora is not None


OTHERS = [path for path in FILES if path.parent.name in ("examples", "pipelines")]
INSTALLS = ("run: rollart envs add ", "`make vllm` makes")  # the command that installs what this machine lacks


@pytest.fixture
def after_the_commands_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that has what they leave: models, and samples of which some are better."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    model = tiny.make(TinyModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, context=512), tmp_path / "model", 0)
    for place in ("models/smollm2-135m", "runs/lake-sample-1/start", "runs/quickstart-1/model"):
        shutil.copytree(model, tmp_path / place)
    asked = {"role": "user", "content": "S.."}
    lines = [
        {"episode": "1", "messages": [asked, {"role": "assistant", "content": text}], "reward": reward}
        for text, reward in (("up", 0.0), ("down", 1.0))
    ]
    (tmp_path / "runs/lake-sample-1/samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.usefixtures("after_the_commands_before_it")
@pytest.mark.parametrize("run", OTHERS, ids=lambda path: path.name)
def test_a_run_file_passes_its_check_where_its_packages_are_installed(run: Path) -> None:
    checked = CliRunner().invoke(app, ["check", str(run.relative_to(ROOT)), "--no-trial"])
    problems = [line for line in checked.stderr.splitlines() if not any(command in line for command in INSTALLS)]
    assert (checked.exit_code == 0) == (not checked.stderr) and not problems, checked.output


def test_examples_were_found() -> None:
    assert len(FILES) > 15
