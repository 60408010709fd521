import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from sample_run import PROCESSES, sample_run

from rollart.core import events as ev
from rollart.observe.timeline import trace, write


def tracks(records: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        if record["ph"] == "X":
            found[record["pid"], record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
    return found


def assert_nested(slices: list[tuple[int, int]]) -> None:
    """Sorted by start, longest first, each slice lies within the open one or begins after it."""
    stack: list[int] = []
    for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
        while stack and stack[-1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1]
        stack.append(end)


@pytest.mark.parametrize("seed", range(3))
def test_slices_of_a_track_nest_or_follow(seed: int) -> None:
    for slices in tracks(list(trace(sample_run(seed=seed)))).values():
        assert_nested(slices)


def test_there_are_as_many_lanes_as_trajectories_at_once() -> None:
    records = list(trace(sample_run()))
    names = {record["pid"]: record["args"]["name"] for record in records if record["name"] == "process_name"}
    lanes = [track for track in tracks(records) if names[track[0]] in ("frozen_lake", "sokoban", "arithmetic")]
    assert PROCESSES <= len(lanes) <= 3 * PROCESSES
    assert (
        len({record["tid"] for record in records if names.get(record["pid"]) == "sokoban" and record["ph"] == "X"})
        <= PROCESSES
    )


def test_every_trajectory_and_every_part_of_it_is_there(tmp_path: Path) -> None:
    log = sample_run()
    number = write(log, tmp_path / "trace.json")
    records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(records) == number
    names = [record["name"] for record in records if record["ph"] == "X"]
    ended = sum(isinstance(event, ev.TrajectoryEnded) for event in log)
    turns = sum(isinstance(event, ev.TurnDone) for event in log)
    assert names.count("reset") == ended
    assert names.count("generate") == names.count("env step") == turns
    assert sum(" finished" in name or " env_failed" in name for name in names) == ended
    assert {"pipeline", "engine-0 requests"} <= {record["name"] for record in records if record["ph"] == "C"}
    assert {"wait", "step 40", "publish 40", "checkpoint 40", "swap to 40", "warmup"} <= set(names)


@pytest.mark.parametrize("limit", [1, 50, 777])
def test_of_a_long_run_the_last_slices_are_written(tmp_path: Path, limit: int) -> None:
    log = sample_run(steps=10)
    whole = list(trace(log))
    names = {record["pid"]: record["args"]["name"] for record in whole if record["name"] == "process_name"}
    inside = [record for record in whole if record["ph"] == "X" and names[record["pid"]] not in ("trainer", "engines")]
    assert len(inside) > limit

    write(log, tmp_path / "trace.json", limit)

    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    others = [record for record in whole if record not in inside]
    assert written == [*others, *inside[-limit:]]


def test_a_killed_run_closes_what_was_open() -> None:
    log = sample_run(steps=10)
    killed = log[: len(log) // 2]
    resumed = ev.RunStarted(
        t=killed[-1].t, name="x", preset="rollart", alpha=1, seed=0, steps=1, tasks=[], version=2, resumed=True
    )
    records = list(trace([*killed, resumed]))
    started = sum(isinstance(event, ev.TrajectoryStarted) for event in killed)
    whole = [record for record in records if record["ph"] == "X" and "outcome" in record["args"]]
    assert len(whole) == started
    assert any(record["args"]["outcome"] == "lost" for record in whole)
    for slices in tracks(records).values():
        assert_nested(slices)


def test_times_that_disagree_still_nest() -> None:
    name = {"trajectory": "x", "task": "a"}
    log: list[ev.AnyEvent] = [
        ev.TrajectoryStarted(t=1.0, group="g", version=0, **name),
        ev.EnvironmentReset(t=1.5, seconds=9.0, **name),
        ev.TurnDone(
            t=2.0, turn=0, engine="e", prompt=1, cached=0, tokens=1, version=0, queue_s=0, generate_s=3, env_s=1, **name
        ),
        ev.Scored(t=2.5, seconds=2.0, **name),
        ev.StepDone(t=3.0, version=1, seconds=2.0, tokens=1, values={}, tasks={}),
        ev.BatchTaken(t=3.1, step=1, ids=[], groups={}, trajectories=0, tokens=0, waited_s=2.0, staleness={}),
    ]  # type: ignore[arg-type]
    for slices in tracks(list(trace(log))).values():
        assert_nested(slices)
