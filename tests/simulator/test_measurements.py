from pathlib import Path

import pytest

from rollart.core import events as ev
from rollart.core.event_log import EventLog
from rollart.core.types import Outcome
from rollart.simulator.measurements import RunMeasurements, measure


def _measured(folder: Path, *timed: tuple[float, ev.Event]) -> RunMeasurements:
    """Of a log of one training step."""
    now = 0.0
    log = EventLog(folder / "events", lambda: now)
    for now, event in timed:  # noqa: B007 (the log reads it)
        log.emit(event)
    now += 1.0
    staleness: dict[int, int] = {}
    log.emit(ev.BatchTaken(step=0, ids=[], groups={}, trajectories=1, tokens=9, waited_s=0.0, staleness=staleness))
    log.emit(ev.StepDone(version=1, seconds=0.5, tokens=9, values={}, tasks={}))
    log.emit(ev.Published(version=1, seconds=0.0))
    log.close()
    return measure(folder)


def _turn(turn: int, generate_s: float, env_s: float = 0.0, pool: str = "") -> ev.TurnDone:
    return ev.TurnDone(
        trajectory="t",
        task="play",
        turn=turn,
        engine="h20-0",
        prompt=10 * (turn + 1),
        cached=0,
        tokens=3,
        version=0,
        queue_s=0.0,
        generate_s=generate_s,
        env_s=env_s,
        pool=pool,
        decode_s=generate_s,
    )


STARTED = ev.TrajectoryStarted(trajectory="t", task="play", group="g", version=0)
ENDED = ev.TrajectoryEnded(
    trajectory="t", task="play", group="g", outcome=Outcome.FINISHED, turns=2, tokens=26, seconds=1.0
)
PLAYED = ev.AgentPlayed(
    trajectory="t",
    task="play",
    requests=2,
    completions=2,
    segments=1,
    forks=0,
    retries=0,
    undelivered=0,
    mismatches=0,
)


def test_the_work_of_an_agent_is_what_it_does_between_requests_and_after_the_last(tmp_path: Path) -> None:
    log = _measured(
        tmp_path, (0.0, STARTED), (3.0, _turn(0, 1.0)), (6.0, _turn(1, 0.5)), (6.75, PLAYED), (7.0, ENDED)
    ).tasks["play"]

    assert log.values["step"] == pytest.approx([2.5, 0.75])
    assert log.starts == [(1, 2.0)]
    assert log.values["reset"] == []


def test_a_wait_before_a_request_is_no_part_of_an_environment_step(tmp_path: Path) -> None:
    reset = ev.EnvironmentReset(trajectory="t", task="play", seconds=0.5)
    log = _measured(
        tmp_path, (0.0, STARTED), (1.0, reset), (3.0, _turn(0, 1.0, 0.5)), (9.0, _turn(1, 1.0, 0.25)), (9.0, ENDED)
    ).tasks["play"]

    assert log.values["step"] == pytest.approx([0.5, 0.25])
    assert log.values["reset"] == pytest.approx([0.5])
    assert log.starts == []


def test_engines_of_a_labelled_pool_are_measured_under_its_name(tmp_path: Path) -> None:
    turn = _turn(0, 1.0, pool="h20: emulated H20 (1/1000)")

    assert list(_measured(tmp_path, (0.0, STARTED), (2.0, turn), (3.0, ENDED)).generations) == ["h20"]
