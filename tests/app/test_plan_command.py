import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.simulator.scenario import load

_SCENARIO = """
model: {name: qwen3-8b}
pools:
  trainer: {role: train, device: H800, count: 4}
  fast: {role: generate, device: H800, count: 6}
tasks:
  - {name: maths, max_context: 8192, sampling: {max_tokens: 2048}}
training: {batch_groups: 2, group_size: 4}
simulate: {workloads: {maths: {prompt: 200, response: {uniform: [200, 900]}}}}
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    (tmp_path / "scenario.yaml").write_text(_SCENARIO)
    return tmp_path / "scenario.yaml"


@pytest.mark.slow
def test_a_plan_is_printed_drawn_and_written(scenario: Path, tmp_path: Path) -> None:
    best, picture = tmp_path / "best.yaml", tmp_path / "plan.png"
    asked = ["--budget", "25", "--steps", "1", "--per-level", "1", "--workers", "1", "--json"]
    done = CliRunner().invoke(app, ["plan", str(scenario), *asked, "-o", str(best), "--plot", str(picture)])

    assert done.exit_code == 0, done.output
    said = json.loads(done.output.splitlines()[-1])
    assert said["fastest"]["price_per_hour"] <= 25
    assert said["given"] is None  # it costs more
    assert load(best).training.batch_groups == said["recommended"]["plan"]["batch_groups"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_malformed_limit_is_reported(scenario: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(scenario), "--max", "H20:32"])

    assert done.exit_code != 0
    assert "CLASS=N" in done.output
