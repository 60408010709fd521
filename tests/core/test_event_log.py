import math
from pathlib import Path

from rollart.core.event_log import EventLog, read_events
from rollart.core.events import AnyEvent, BatchTaken, StepDone, TrajectoryEnded, Warned
from rollart.core.types import Outcome


def write(path: Path, at: float, *events: AnyEvent) -> None:
    now = 100.0
    log = EventLog(path, lambda: now)
    now += at
    for event in events:
        log.emit(event)
    log.close()


def test_events_are_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    ended = TrajectoryEnded(
        trajectory="g.0", task="t", group="g", outcome=Outcome.STALE, turns=1, tokens=2, seconds=0.5, reason="stale"
    )
    taken = BatchTaken(
        step=3, ids=["g"], groups={"t": 1}, trajectories=2, tokens=9, waited_s=0.1, staleness={0: 1, 1: 1}
    )
    write(path, 2.0, ended, taken)
    assert list(read_events(path)) == [ended, taken]
    assert [event.t for event in read_events(path)] == [2.0, 2.0]


def test_values_that_json_does_not_have_are_left_out_and_the_log_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    values = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1}
    write(path, 2.0, StepDone(version=1, seconds=1.0, tokens=9, values=values, tasks={"t": values}))
    (step,) = read_events(path)
    assert isinstance(step, StepDone)
    assert step.values == {"lr": 0.1} == step.tasks["t"]


def test_time_goes_on_across_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 5.0, Warned(message="first life"))
    write(path, 1.0, Warned(message="second life"))
    assert [event.t for event in read_events(path)] == [5.0, 6.0]


def test_a_truncated_line_is_removed_before_more_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, 1.0, Warned(message="whole"))
    with open(path, "ab") as file:
        file.write(b'{"kind":"Warned","t":1.5,"mess')
    assert len(list(read_events(path))) == 1
    write(path, 1.0, Warned(message="after the kill"))
    assert [event.message for event in read_events(path) if isinstance(event, Warned)] == ["whole", "after the kill"]
