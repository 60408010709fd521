from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.config import loading
from rollart.simulator.scenario import Scenario, load
from rollart.simulator.simulation import simulate


@pytest.mark.slow
def test_a_run_becomes_a_scenario_that_simulates_and_a_picture_of_the_fits(tmp_path: Path) -> None:
    scenario = Scenario.model_validate(
        {
            "model": {"tiny": {"context": 512}},
            "tasks": [{"name": "play", "max_turns": 4, "max_context": 400, "sampling": {"max_tokens": 8}}],
            "training": {"steps": 3, "batch_groups": 2, "group_size": 4},
            "simulate": {
                "workloads": {"play": {"turns": 3, "prompt": 20, "observation": 5, "response": 4, "step": 0.5}}
            },
        }
    )
    run = tmp_path / "run"
    simulate(scenario, folder=run)
    (run / "run.yaml").write_text(loading.dump(scenario))

    done = CliRunner().invoke(app, ["calibrate", str(run), "-o", str(tmp_path / "workload.yaml")])

    assert done.exit_code == 0, done.output
    assert "play" in done.output
    assert "always 0.5" in done.output
    assert load(tmp_path / "workload.yaml").workload("play").turns == 3
    assert (tmp_path / "workload.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["calibrate", str(tmp_path)])

    assert done.exit_code != 0
    assert "is not a run folder" in done.output
