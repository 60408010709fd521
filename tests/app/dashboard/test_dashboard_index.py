"""What the dashboard computes from a log agrees with what the report computes."""

import json
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from dashboard_runs import finished_run, hostile_run, imitation_log
from hypothesis import given
from hypothesis import strategies as st
from run_locks import lock_held
from sample_run import sample_run, write_log

from rollart.app.dashboard import reader
from rollart.app.dashboard.feed import Machines
from rollart.app.dashboard.pace import pace
from rollart.app.dashboard.phase_lanes import PHASES, PhaseLanes
from rollart.app.dashboard.run_index import RunIndex
from rollart.app.dashboard.runs import Runs
from rollart.app.dashboard.time_index import TimeIndex
from rollart.app.dashboard.trajectory_table import TrajectoryTable
from rollart.app.dashboard.turn_table import TurnTable
from rollart.app.dashboard.views import PUSHED, VIEWS, PushedView
from rollart.app.run_reader import RunFolder
from rollart.core import events as ev
from rollart.core.errors import RollartError
from rollart.core.types import Hop, Outcome
from rollart.observe.metrics import measure

LOG = sample_run(steps=12)


def read(folder: Path) -> RunIndex:
    index = RunIndex(folder)
    index._read_headlines()
    index._read_new()
    index.complete = True
    return index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> RunIndex:
    return read(finished_run(tmp_path_factory.mktemp("runs") / "sample-1"))


def test_the_overview_has_the_numbers_of_the_report(index: RunIndex) -> None:
    shot, view = measure(LOG), VIEWS["overview"](index, {})
    assert view["step"] == shot.step == 12
    assert [task["name"] for task in view["tasks"]] == [task.name for task in shot.tasks]
    assert view["tasks"][0]["now"]["success"] == shot.tasks[0].held_out[-1].success


def test_the_rare_events_alone_give_steps_and_evaluations(index: RunIndex) -> None:
    """They are what the overview of a huge log shows first."""
    first, all_of_it = index.headlines.snapshot(), index.metrics.snapshot()
    assert [step.version for step in first.history] == [step.version for step in all_of_it.history]
    assert [task.held_out for task in first.tasks] == [task.held_out for task in all_of_it.tasks]


def test_every_trajectory_is_in_the_table_with_its_outcome(index: RunIndex) -> None:
    ended = [event for event in LOG if isinstance(event, ev.TrajectoryEnded)]
    page = index.table.page({"sort": "started"}, 0, 10_000)
    assert page["matching"] == sum(isinstance(event, ev.TrajectoryStarted) for event in LOG)
    assert Counter(row["outcome"] for row in page["rows"]) == Counter(event.outcome.value for event in ended)


@pytest.mark.parametrize("by", ["reward", "turns", "tokens", "seconds", "age"])
def test_rows_are_sorted_by_any_column(index: RunIndex, by: str) -> None:
    rows = index.table.page({"sort": by, "order": "asc"}, 0, 10_000)["rows"]
    values = [row[by] for row in rows if row[by] is not None]
    assert values == sorted(values)
    assert len(set(values)) > 1


def test_filters_combine(index: RunIndex) -> None:
    page = index.table.page({"task": "sokoban", "reward_min": "0.5", "split": "training"}, 0, 10_000)
    assert 0 < page["matching"] < page["total"]
    assert all(row["task"] == "sokoban" and row["reward"] >= 0.5 and not row["held_out"] for row in page["rows"])


def test_a_filter_that_is_still_being_typed_or_unknown_is_no_error(index: RunIndex) -> None:
    assert index.table.page({"reward_min": "-"}, 0, 5)["matching"] == len(index.table)
    assert index.table.page({"task": "no such task"}, 0, 5)["matching"] == 0


@given(st.lists(st.integers(0, len(LOG)), max_size=6))
def test_a_page_that_takes_changes_at_any_time_sees_what_one_that_begins_now_sees(stops: list[int]) -> None:
    lanes, seen, change, at = PhaseLanes(), dict[str, tuple[object, ...]](), 0, 0
    for stop in [*sorted(stops), len(LOG)]:
        for event in LOG[at:stop]:
            lanes.fold(event)
        at = max(at, stop)
        update = lanes.since(change)
        change = update["change"]
        if update["all"]:
            seen = {}
        for row in update["rows"]:
            seen[row[0]] = row
        for id in update["gone"]:
            seen.pop(id, None)
        assert seen == {row[0]: row for row in lanes.since(0)["rows"]}


def test_a_trajectory_is_in_one_phase_at_a_time_until_its_step_is_done() -> None:
    lanes = PhaseLanes()
    started = ev.TrajectoryStarted(trajectory="g1.0", task="a", group="g1", version=0)
    ended = ev.TrajectoryEnded(
        trajectory="g1.0", task="a", group="g1", outcome=Outcome.FINISHED, turns=1, tokens=2, seconds=1.0
    )
    batch = ev.BatchTaken(step=0, ids=["g1"], groups={"a": 1}, trajectories=1, tokens=2, waited_s=0.0, staleness={0: 1})
    phases = []
    for event in (started, ev.PhasesChanged(phases={"stepping": ["g1.0"], "generating": ["unknown"]}), ended, batch):
        lanes.fold(event)
        ((phase, number),) = lanes.counts()["a"].items()
        phases.append((phase, number))
    assert phases == [("waiting", 1), ("stepping", 1), ("ready", 1), ("training", 1)]
    lanes.fold(ev.StepDone(version=1, seconds=1.0, tokens=2, values={}, tasks={}))
    assert len(lanes) == 0
    assert set(PHASES) >= {phase for phase, _ in phases}


@given(st.lists(st.tuples(st.floats(0, 90), st.floats(0, 30)), min_size=1, max_size=20), st.integers(64, 900))
def test_areas_of_the_timeline_have_the_time_of_the_slices(slices: list[tuple[float, float]], pixels: int) -> None:
    """However the window is cut into buckets, the time in each phase adds up."""
    table = TrajectoryTable()
    time = TimeIndex(table, TurnTable(table))
    for start, seconds in slices:
        time.fold(ev.Scored(trajectory="x", task="a", seconds=seconds, t=start + seconds))
    whole = sum(seconds for _, seconds in slices)

    density = time._density(0, 120, pixels)
    assert np.sum(density[3]) * 120 / len(density[3]) == pytest.approx(whole, abs=0.2)


def test_a_wide_window_is_areas_and_a_narrow_one_slices(index: RunIndex) -> None:
    end = index.metrics.t
    narrow = index.time.window(end / 2, end / 2 + 1, 800)
    assert narrow["slices"] and narrow["density"] is None
    assert {row["id"] for row in narrow["trajectories"]} <= set(index.table.ids)
    assert any(track["name"] == "trainer steps" for track in index.time.window(0, end, 800)["tracks"])


def test_the_pace_names_what_the_trainer_waits_for() -> None:
    shot = measure(LOG)
    found = pace(shot)
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(1, abs=0.05)
    assert found["text"].endswith(".")


def test_events_that_are_added_are_read_and_nothing_is_read_twice(tmp_path: Path) -> None:
    half = len(LOG) // 2
    (tmp_path / "run-1").mkdir()
    write_log(tmp_path / "run-1" / "events", LOG[:half])
    index = read(tmp_path / "run-1")
    assert index.number == half
    write_log(tmp_path / "run-1" / "events", LOG[half:])
    index._read_new()
    assert index.number == len(LOG)


def test_a_run_whose_controller_was_killed_is_interrupted_in_every_view_until_it_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    folder.mkdir()
    runs = Runs(tmp_path)
    write_log(folder / "events", LOG[:-1])  # its end is missing
    with lock_held(folder):
        index = read(folder)
        index._read_new()
        assert (index.state()["phase"], index.state()["ended"]) == ("training", False)
        assert runs.listed()[0]["phase"] == "running"
        assert RunFolder(folder).summary()["phase"] == "training"
    assert RunFolder(folder).summary()["phase"] == runs.listed()[0]["phase"] == "interrupted"
    shown = RunFolder(folder).snapshot()
    command = f"rollart train {folder}/run.yaml --resume --run-dir {folder}"
    assert shown.warnings[-1] == f"the controller was killed, or its machine went down; continue with: {command}"
    index._read_new()
    index._read_new()
    assert (index.state()["phase"], index.state()["ended"]) == ("interrupted", True)
    assert sum(notice["text"] == shown.warnings[-1] for notice in index.feed.notices) == 1
    assert read(folder).headlines.phase == "interrupted"
    write_log(folder / "events", [ev.RunStarted(name="a", preset="", alpha=1, seed=0, steps=9, tasks=[], resumed=True)])
    with lock_held(folder):
        index._read_new()
        assert (index.state()["phase"], index.state()["ended"]) == ("starting", False)


def test_a_run_is_found_in_a_folder_of_folders_and_nothing_outside_is(tmp_path: Path) -> None:
    finished_run(tmp_path / "runs" / "team" / "sample-1", steps=2)
    outside = finished_run(tmp_path / "elsewhere" / "secret-1", steps=2)
    (tmp_path / "runs" / "link").symlink_to(outside)
    runs = Runs(tmp_path / "runs")
    assert runs.names() == ["team/sample-1"]
    for name in ("../elsewhere/secret-1", "link", "/etc", "", "team"):
        with pytest.raises(KeyError):
            runs.get(name)


def test_a_folder_that_is_a_run_is_served_by_itself(tmp_path: Path) -> None:
    assert Runs(finished_run(tmp_path / "sample-7", steps=2)).names() == ["sample-7"]
    with pytest.raises(RollartError, match="is not a folder"):
        Runs(tmp_path / "missing")


def test_a_huge_message_is_cut_and_says_so(tmp_path: Path) -> None:
    index = read(hostile_run(tmp_path / "hostile-1"))
    (turn,) = reader.read(index, "hostile-000000.0")["turns"]
    assert len(turn["messages"][1]["text"]) < 21_000
    assert "characters are left out" in turn["messages"][1]["text"]
    assert turn["logprobs"] == [-0.1, -2.0] and turn["versions"] == [0, 1]


def test_looking_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path / "hostile-1")
    sqlite3.connect(folder / "ledger.sqlite").execute("pragma wal_checkpoint(truncate)").fetchall()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "-shm" not in path.name}
    index = read(folder)
    for view in VIEWS.values():
        view(index, {})
    reader.read(index, "hostile-000000.0")
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "-shm" not in path.name}
    assert {path: data for path, data in after.items() if data} == {path: data for path, data in before.items() if data}


@pytest.mark.slow
def test_results_are_shown_before_the_log_is_read_to_its_end(tmp_path: Path) -> None:
    index = RunIndex(finished_run(tmp_path / "sample-1", steps=400))
    seen = []
    fold = index._fold_headlines

    def watched(events: list[ev.AnyEvent]) -> None:
        fold(events)
        seen.append(len(VIEWS["overview"](index, {})["steps_s"]))

    index._fold_headlines = watched  # type: ignore[method-assign]
    index._read_headlines()
    assert 0 < seen[0] < 20
    assert seen[-1] == 400


@pytest.mark.parametrize("view", PUSHED)
def test_the_parts_that_are_pushed_add_up_to_the_view(tmp_path: Path, view: str) -> None:
    folder = tmp_path / "sample-1"
    folder.mkdir()
    index, pushed, seen, lanes = None, None, {}, {}
    for cut in range(0, len(LOG), 700):
        write_log(folder / "events", LOG[cut : cut + 700])
        index = index or RunIndex(folder)
        pushed = pushed or PushedView(index, view)
        index._read_new()
        index.complete = True
        seen |= json.loads(pushed.changes())
        change = seen.get("lanes", {"all": False, "rows": [], "gone": []})
        lanes = ({} if change["all"] else lanes) | {row[0]: row for row in change["rows"]}
        lanes = {id: row for id, row in lanes.items() if id not in change["gone"]}
    assert index is not None and pushed is not None
    whole = json.loads(msgspec.json.encode(VIEWS[view](index, {})))
    assert lanes == {row[0]: row for row in whole.pop("lanes", {"rows": []})["rows"]}
    del whole["state"]
    seen.pop("lanes", None)
    assert seen == whole
    pushed.changes()  # no trajectory moved: this is what differs from the last time
    assert pushed.changes() == b"{}"


def swapped(engine: str, t: float, *sources: tuple[str, int], version: int = 3, relay: str = "") -> ev.EngineSwapped:
    hops = tuple(Hop(source, size, 0.5) for source, size in sources)
    return ev.EngineSwapped(t=t, engine=engine, version=version, seconds=1.0, hops=hops, relay=relay)


def test_a_version_spreads_as_a_tree_of_relays() -> None:
    machines = Machines()
    log = [
        ev.Published(t=10.0, version=3, seconds=0.5, bytes=100),
        swapped("a", 11.0, ("http://trainer", 100), relay="http://a"),
        swapped("b", 12.0, ("http://trainer", 20), ("http://a", 80), relay="http://b"),
        swapped("beside-b", 12.5),
        swapped("c", 13.0, ("http://b", 100), relay="http://c"),
        swapped("local", 10.5),
        swapped("late", 9.0, version=2),
        ev.Published(t=14.0, version=4, seconds=0.5),
    ]
    for event in log:
        machines.fold(event)
    found = machines.fan_out({"b": "node-b", "beside-b": "node-b", "a": "node-a", "c": "node-c"})

    def shape(rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {row["engine"]: shape(row["below"]) for row in rows}

    assert found["published"]["version"] == 3  # no engine has version 4 yet
    assert shape(found["engines"]) == {"a": {"b": {"beside-b": {}, "c": {}}}, "local": {}}
    assert found["engines"][0]["after_s"] == 1.0
    assert [hop["engine"] for hop in found["engines"][0]["below"][0]["hops"]] == ["", "a"]


def test_relays_that_name_each_other_are_no_endless_tree() -> None:
    machines = Machines()
    machines.fold(ev.Published(t=1.0, version=3, seconds=0.5))
    machines.fold(swapped("a", 2.0, ("http://b", 1), relay="http://a"))
    machines.fold(swapped("b", 2.0, ("http://a", 1), relay="http://b"))
    (root,) = machines.fan_out({})["engines"]
    assert len(root["below"]) == 1


def test_a_trajectory_that_generates_is_in_the_lane_of_its_pool() -> None:
    lanes = PhaseLanes()
    for id in ("a", "b"):
        lanes.fold(ev.TrajectoryStarted(t=0.0, trajectory=id, task="t", group="g", version=0))
    lanes.fold(ev.PhasesChanged(t=1.0, phases={"stepping": ["a"]}))
    lanes.fold(ev.PhasesChanged(t=2.0, phases={"generating": ["a", "b"]}, pools={"fast": [1]}))
    seen = lanes.since(0)
    assert seen["pools"] == ["fast"]
    assert {row[0]: row[3] for row in seen["rows"]} == {"a": -1, "b": 0}


def test_imitation_has_its_loss_and_its_step_in_the_overview(tmp_path: Path) -> None:
    write_log(tmp_path / "events", imitation_log())
    view = VIEWS["overview"](read(tmp_path), {})
    assert (view["step"], view["steps"], view["phase"]) == (200, 200, "finished")
    assert view["losses"][0] == (0, 2.0)
    assert view["about"]["work"] == "imitation"


def test_many_engines_swap_on_one_track_and_failures_have_one() -> None:
    index = TimeIndex(TrajectoryTable(), TurnTable(TrajectoryTable()))
    for number in range(20):
        index.fold(ev.EngineSwapped(t=2.0 + number, engine=f"engine-{number}", version=1, seconds=0.5))
    index.fold(ev.EnvironmentLost(t=3.0, task="a", call="step", reason="it hung"))
    tracks = {track["name"]: track["slices"] for track in index.window(0.0, 30.0, 100)["tracks"]}
    assert set(tracks) == {"swap (20)", "failures"}
    assert len(tracks["swap (20)"]) == 20
