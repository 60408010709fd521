import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollart.app.cli import app
from rollart.simulator import paper
from rollart.simulator.paper import Simulated
from rollart.simulator.scenario import Scenario, load

PROMPTS = paper.FOLDER / "prompts"
ROLES = ("train", "generate")
FOLDERS = (paper.FOLDER, PROMPTS, paper.FOLDER.parent / "simulate")
EXAMPLES = sorted(path for folder in FOLDERS for path in folder.glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_scenarios_that_ship_are_valid(path: Path) -> None:
    assert load(path).name == path.stem


def test_tasks_are_the_same_in_all_paper_scenarios() -> None:
    seen: dict[str, object] = {}
    for name in ("end_to_end", "end_to_end_small", "same_cost", "same_cost_math", "step_breakdown"):
        for task, workload in load(paper.FOLDER / f"{name}.yaml").simulate.workloads.items():
            tokens = workload.model_dump(include={"turns", "prompt", "observation", "window", "response", "step"})
            assert seen.setdefault(task, tokens) == tokens, f"{task} in {name}"


def test_constants_are_the_same_in_all_experiments_of_the_paper() -> None:
    experiments = [path for path in EXAMPLES if path.parent == paper.FOLDER and path.stem != "production"]
    constants = [load(path).simulate.constants for path in experiments]
    assert len(constants) == 5 and all(each == constants[0] for each in constants)


def test_a_row_is_close_within_fifteen_percent() -> None:
    assert paper.PaperRow("f", "w", 1.0, 1.15).close and not paper.PaperRow("f", "w", 1.0, 1.16).close


def test_reproduce_counts_missed_figures_and_their_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        paper.PaperRow("f", "near", 1.0, 1.1),
        paper.PaperRow("f", "far", 1.0, 2.0),
        paper.PaperRow("f", "explained", 1.0, 3.0, "because"),
        paper.PaperRow("f", "a step, s", 100.0, 105.0, absolute=True),
    ]
    monkeypatch.setattr(paper, "reproduce", lambda scenarios: iter(rows))
    (tmp_path / "end_to_end.yaml").touch()
    fit = {"cross_validated_within_15": 0.8, "not_pinned_down": ["pass_s"], "command": "solve", "values": {}}
    (tmp_path / "fit.json").write_text(json.dumps(fit))
    arguments = ["--json", "-o", str(tmp_path / "paper.png"), "--scenarios", str(tmp_path)]
    result = CliRunner().invoke(app, ["reproduce", "paper", *arguments])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.strip().splitlines()[-1])
    counts = [summary[key] for key in ("within_15", "missed", "missed_with_reason")]
    assert counts == [1, 1, 1]
    assert summary["seconds"]["within_15"] == 1
    assert summary["cross_validated_within_15"] == 0.8 and summary["fit"]["not_pinned_down"] == ["pass_s"]
    assert (tmp_path / "paper.png").stat().st_size > 1000


def test_without_a_stored_fit_nothing_is_said_of_it(tmp_path: Path) -> None:
    assert set(paper.stored_fit(tmp_path).values()) == {None}


@pytest.mark.parametrize(("folder", "sync"), [(paper.FOLDER, [32, 96]), (PROMPTS, [128, 128])])
def test_sync_trains_where_the_reading_of_the_paper_says(folder: Path, sync: list[int]) -> None:
    seen: dict[str, Scenario] = {}

    def record(scenario: Scenario) -> Simulated:
        seen[scenario.rollout.preset] = scenario
        raise StopIteration

    scenarios = paper.PaperScenarios(folder, lambda name: None, simulate=record)
    for preset in ("sync", "sync_plus", "one_off", "start_bound", "rollart"):
        with pytest.raises(StopIteration):
            scenarios.end_to_end("qwen3-32b", preset)
    devices = {
        preset: [sum(pool.count * pool.tensor_parallel for pool in each.pools_of(role).values()) for role in ROLES]
        for preset, each in seen.items()
    }
    apart = [32, 96]
    assert devices == {"sync": sync, "sync_plus": sync, "one_off": apart, "start_bound": apart, "rollart": apart}
    colocated = {preset for preset, each in seen.items() if each.simulate.colocated}
    assert colocated == (set() if sync == apart else {"sync", "sync_plus"})


def test_a_batch_of_the_other_reading_has_eight_trajectories_for_each_prompt() -> None:
    sizes = {folder: load(folder / "end_to_end.yaml").training.batch_groups for folder in (paper.FOLDER, PROMPTS)}
    assert sizes[PROMPTS] == 8 * sizes[paper.FOLDER] == 512
    assert paper.Reading.of(PROMPTS).of_a_prompt == 8 and paper.Reading.of(paper.FOLDER).of_a_prompt == 1


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_every_published_figure_is_met_or_has_a_reason() -> None:
    rows = list(paper.reproduce(paper.PaperScenarios(paper.FOLDER, lambda name: None)))
    assert [row.what for row in rows if not row.close and not row.reason] == []
