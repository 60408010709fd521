"""Layouts of the trainer, before anything starts: what cannot be, what does not fit, what `auto` chooses."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.app.preflight import load_run
from rollart.config import RunFile
from rollart.core.errors import ConfigError
from rollart.launch.launcher import Node
from rollart.placement.inventory import Inventory
from rollart.placement.plan import PlacementPlan, plan, with_plan
from rollart.placement.request import PlacementError

ROOT = Path(__file__).parents[2]
SCALE = sorted((ROOT / "examples" / "scale").glob("*.yaml"))
RUN = """
model: {tiny: {hidden: 96, heads: 6, kv_heads: 2, context: 512}}
tasks: [{name: t, env: "json:loads", max_context: 500}]
pools: {trainer: {role: train, device: cpu, count: 4}}
"""


def written(folder: Path, more: str = "") -> Path:
    path = folder / "run.yaml"
    path.write_text(RUN + more)
    return path


@pytest.mark.parametrize(
    ("parallel", "sentence"),
    [
        ("{tensor: 3}", "4 ranks cannot be divided into context 1 x tensor 3"),
        ("{tensor: 4}", "tensor 4 must divide the model's 6 attention heads and its 2 KV heads; possible are"),
        ("{context: 4}", "context 4 must divide the model's 6 attention heads"),
        ("{expert: 2}", "expert 2 needs a mixture of experts, but the model has none"),
        ("{auto: true, tensor: 2}", "`auto` chooses context, tensor and expert; leave them out"),
    ],
)
def test_a_layout_that_cannot_be_is_an_error_of_its_key(tmp_path: Path, parallel: str, sentence: str) -> None:
    path = written(tmp_path, f"training: {{parallel: {parallel}}}\n")
    with pytest.raises(ConfigError, match=re.escape(sentence)) as error:
        load_run(path)
    assert "training.parallel" in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("command", [["train"], ["check"], ["eval", "--model", "nowhere"]])
def test_every_command_refuses_it(tmp_path: Path, command: list[str]) -> None:
    path = written(tmp_path, "training: {parallel: {tensor: 4}}\n")
    name, *more = command
    done = CliRunner().invoke(app, [name, str(path), *more])
    assert done.exit_code == 2
    assert "training.parallel: tensor 4 must divide" in done.output


def test_auto_is_data_parallelism_where_memory_does_not_matter(tmp_path: Path) -> None:
    run = load_run(written(tmp_path, "training: {parallel: auto}\n"))
    nodes = (Node("here", "", {"cpu": 4.0}, {"cpu": 4.0}),)
    planned = plan(run, Inventory(nodes, "this machine", overcommit=True))
    resolved = with_plan(run, planned)
    assert not resolved.training.parallel.auto
    assert resolved.training.parallel.layout(4).data == 4
    assert "its node" in planned.memory["trainer"].why or "node's" in planned.memory["trainer"].why


def on_gpus(run: RunFile) -> PlacementPlan:
    nodes = tuple(Node(f"n{i}", "", has, has) for i in range(64) for has in [{"H100": 8.0, "cpu": 128.0}])
    return plan(run, Inventory(nodes, "a cluster"))


@pytest.fixture
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.usefixtures("in_the_project")
@pytest.mark.parametrize("path", SCALE, ids=lambda path: path.stem)
def test_the_run_files_at_scale_fit_as_they_are_and_with_auto(path: Path) -> None:
    own = on_gpus(load_run(path)).memory["trainer"]
    run = load_run(path, ["training.parallel=auto"])
    planned = on_gpus(run)
    chosen = planned.memory["trainer"]
    assert own.gigabytes < 72
    assert chosen.gigabytes < 72
    assert "GB" in chosen.why
    assert chosen.layout == with_plan(run, planned).training.parallel.layout(run.pools["trainer"].count)


@pytest.mark.usefixtures("in_the_project")
def test_a_layout_that_does_not_fit_is_refused_with_one_that_does() -> None:
    path = ROOT / "examples" / "scale" / "qwen3-32b.yaml"
    with pytest.raises(PlacementError, match=r"training\.parallel does not fit.*What to do: training: \{") as error:
        on_gpus(load_run(path, ["training.parallel={}", "training.recompute=none"]))
    proposed = re.search(r"training: (\{.*?\}\})", str(error.value))
    assert proposed is not None
    changed = [f"training.{key}" for key in re.findall(r"\w+: \w+(?=,)", proposed[1])]
    parallel = re.search(r"parallel: (\{.*?\})", proposed[1])
    assert parallel is not None
    overrides = [text.replace(": ", "=", 1) for text in changed] + [f"training.parallel={parallel[1]}"]
    assert on_gpus(load_run(path, ["training.recompute=none", *overrides])).memory["trainer"].gigabytes < 72


@pytest.mark.usefixtures("in_the_project")
def test_check_prints_memory_by_device_and_what_auto_chose() -> None:
    nodes = str(ROOT / "examples" / "scale" / "nodes.json")
    arguments = ["check", "examples/scale/qwen3-32b.yaml", "--nodes", nodes, "--set", "training.parallel=auto"]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert "…" not in shown.output.split("Memory of each device")[1]
    for word in ("parameters", "gradients", "optimizer", "activations", "KV"):
        assert word in shown.output
    assert re.search(r"trainer: data \d+.*; chosen: takes [\d.]+ of 72 GB", shown.output)
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    memory = json.loads(as_json.stdout.splitlines()[-1])["plan"]["memory"]
    assert set(memory) == {"trainer", "policy"}
    assert memory["policy"]["parts"]["KV"] > 0
