"""The Python API: what the commands do, a program can do."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_run import sample_run, write_log

import rollart
from benchmarks import house
from rollart.core import events as ev
from rollart.core.types import Message, Outcome, Trajectory, Turn
from rollart.observe.snapshot import StepPoint
from rollart.rollout.ledger import SqliteLedger

TINY = """
name: tiny
model: {tiny: {hidden: 32, layers: 1, context: 256}}
tasks:
  - {name: guess_number, env: "rollart.envs.guess_number:GuessNumber", max_turns: 2, max_context: 160,
     sampling: {max_tokens: 4}}
training: {steps: 2, batch_groups: 2, group_size: 2}
evaluation: {every: 2, episodes: 2, final_episodes: 4}
checkpoint: {every: 1}
"""
TURN = Turn((Message("user", "P _ G"),), (1, 2, 3), "Right", (4, 5), (-0.1, -0.2), (0, 0), "stop", 1.0, 0.2, 0.1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> rollart.RunFolder:
    folder = tmp_path_factory.mktemp("sample-1")
    write_log(folder / "events", sample_run(steps=6))
    ledger = SqliteLedger.open(folder / "ledger.sqlite")
    first = Trajectory("lake-000001.0", "lake", "lake-000001", 0, 7, Outcome.FINISHED, (TURN,), 1.0, success=True)
    ledger.add(first)
    ledger.add(msgspec.structs.replace(first, id="lake-000002.0", started_s=1.0, info={"moves": 3}), held_out=True)
    ledger.add(msgspec.structs.replace(first, id="maze-000001.0", task="maze", started_s=2.0, info={"moves": "none"}))
    ledger.close()
    return rollart.RunFolder(folder)


def test_importing_the_package_imports_only_the_standard_library() -> None:
    code = (
        "import sys; known = set(sys.modules); import rollart; rollart.__version__\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - known} - sys.stdlib_module_names\n"
        "assert new == {'rollart'}, new"
    )
    command = [sys.executable, "-S", "-c", code]
    root = Path(rollart.__file__).parents[1]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(root)})
    assert ended.returncode == 0, ended.stderr


def test_every_public_name_exists_and_others_are_attribute_errors() -> None:
    for name in rollart.__all__:
        assert getattr(rollart, name) is not None
    assert dir(rollart) == sorted(rollart.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = rollart.trian  # type: ignore[attr-defined]


def test_no_sub_package_hides_a_public_name() -> None:
    """Importing a sub-package sets it as an attribute of `rollart`."""
    assert not set(rollart.__all__) & {room for floor in house.FLOORS for room in floor}


def test_a_run_file_is_loaded_with_overrides_and_problems_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    assert rollart.load_run(path, ["training.steps=7"]).training.steps == 7
    assert rollart.load_run(str(path)).training.steps == 2
    with pytest.raises(rollart.ConfigError, match="unknown key 'stepps' in training; did you mean 'steps'"):
        rollart.load_run(path, ["training.stepps=7"])


def test_events_are_typed_and_can_be_chosen_by_kind(recorded: rollart.RunFolder) -> None:
    steps = list(recorded.events(ev.StepDone))
    assert [step.version for step in steps] == list(range(1, 7))
    assert len(list(recorded.events(ev.StepDone, ev.Published))) == 12
    everything = recorded.events()
    assert list(everything) == list(everything)
    assert [type(event) for event in everything] == [type(event) for event in sample_run(steps=6)]


def test_steps_are_one_record_for_each_optimizer_step(recorded: rollart.RunFolder) -> None:
    steps = list(recorded.steps())
    assert all(isinstance(step, StepPoint) for step in steps)
    assert [step.version for step in steps] == list(range(1, 7))
    row = next(recorded.steps().rows())
    assert row["values.loss"] == 1.0
    assert row["staleness.0"] == 24


def test_trajectories_come_from_the_ledger(recorded: rollart.RunFolder) -> None:
    assert [each.id for each in recorded.trajectories()] == ["lake-000001.0", "lake-000002.0", "maze-000001.0"]
    assert [each.id for each in recorded.trajectories("lake", held_out=False)] == ["lake-000001.0"]
    assert [each.id for each in recorded.trajectories(held_out=True)] == ["lake-000002.0"]
    assert recorded.trajectory("maze").turns == (TURN,)
    with pytest.raises(rollart.RollartError, match="several ids start with 'lake'"):
        recorded.trajectory("lake")


def test_the_summary_is_that_of_the_command(recorded: rollart.RunFolder) -> None:
    summary = recorded.summary()
    assert summary["tasks"].keys() == {"frozen_lake", "sokoban", "arithmetic"}
    assert (summary["version"], summary["directory"]) == (6, str(recorded.path))
    assert recorded.snapshot().step == 6


def test_a_folder_without_a_log_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(rollart.RollartError, match=r"is not a run folder: it has no event log"):
        rollart.RunFolder(tmp_path)


def test_records_become_data_frames(recorded: rollart.RunFolder) -> None:
    pytest.importorskip("pandas")
    steps = recorded.steps().to_pandas()
    assert list(steps["version"]) == list(range(1, 7))
    assert steps["values.entropy"].mean() == pytest.approx(0.7)
    events = recorded.events().to_pandas()
    assert set(events["kind"]) >= {"StepDone", "TurnDone"}


def test_records_become_arrow_tables(recorded: rollart.RunFolder) -> None:
    pytest.importorskip("pyarrow")
    table = recorded.trajectories().to_arrow()
    assert table.column("turns").to_pylist()[0][0]["tokens"] == [4, 5]
    assert table.column("info.moves").to_pylist() == [None, "3", '"none"']  # mixed types become JSON
    assert recorded.events().to_arrow().num_rows == len(list(recorded.events()))


@pytest.mark.parametrize("package", ["pandas", "pyarrow"])
def test_a_missing_package_is_named(recorded: rollart.RunFolder, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    convert = {"pandas": "to_pandas", "pyarrow": "to_arrow"}[package]
    with pytest.raises(rollart.RollartError, match=f"needs the package {package}.*pip install {package}"):
        getattr(recorded.steps(), convert)()


@pytest.mark.slow
def test_a_simulation_has_one_result_for_each_seed(tmp_path: Path) -> None:
    scenario = rollart.load_scenario(
        Path(__file__).parents[2] / "examples/paper/end_to_end.yaml", ["training.steps=4"], preset="sync"
    )
    folder = tmp_path / "simulated"
    results = rollart.simulate(scenario, seed=5, seeds=2, folder=folder)
    assert [(result.seed, result.preset) for result in results] == [(5, "sync"), (6, "sync")]
    assert len(list(rollart.RunFolder(folder).steps())) == 4


def test_training_inside_a_running_loop_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)

    async def main() -> None:
        rollart.train(path, folder=tmp_path / "run")

    with pytest.raises(rollart.RollartError, match="event loop is running in this thread"):
        asyncio.run(main())


def test_a_folder_that_holds_files_is_refused_unless_resumed(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    with pytest.raises(rollart.RollartError, match="is not empty"):
        rollart.train(path, folder=tmp_path)
    with pytest.raises(rollart.RollartError, match="is not a Hugging Face model folder"):
        rollart.evaluate(path, tmp_path)


@pytest.mark.slow
def test_a_program_trains_resumes_and_evaluates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    seen: list[Any] = []
    trained = rollart.train(path, folder=tmp_path / "run", on_event=seen.append)
    assert capfd.readouterr().out == ""
    assert isinstance(seen[-1], ev.RunEnded)
    assert [step.version for step in trained.steps()] == [1, 2]
    assert len(list(trained.trajectories(held_out=False))) >= 8
    for name in ("model/config.json", "curves.png", "snapshot.json", "summary.json"):
        assert (trained.path / name).exists(), name

    longer = rollart.load_run(path, ["training.steps=3"])
    resumed = rollart.train(longer, folder=trained.path, resume=True)
    assert [step.version for step in resumed.steps()] == [1, 2, 3]
    assert resumed.run == longer

    scores = asyncio.run(_in_a_thread(path, resumed.model, tmp_path / "eval"))
    assert scores.tasks["guess_number"].episodes == 4
    assert len(list(rollart.RunFolder(scores.folder).trajectories(held_out=True))) == 4


async def _in_a_thread(path: Path, model: Path, folder: Path) -> rollart.Evaluation:
    return await asyncio.to_thread(rollart.evaluate, path, model, folder=folder)
