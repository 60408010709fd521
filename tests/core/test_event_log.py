import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_run import sample_run, write_log

from rollart.core import event_log
from rollart.core.event_log import EventLog, EventReader, follow, read_events
from rollart.core.events import AnyEvent, BatchTaken, StepDone, TrajectoryEnded, TurnDone, Warned
from rollart.core.types import Outcome


def write(path: Path, at: float, *events: AnyEvent) -> None:
    now = 100.0
    log = EventLog(path, lambda: now)
    now += at
    for event in events:
        log.emit(event)
    log.close()


def messages(path: Path) -> list[str]:
    return [event.message for event in read_events(path, Warned)]


def test_events_are_read_back_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "events"
    ended = TrajectoryEnded(
        trajectory="g.0", task="t", group="g", outcome=Outcome.STALE, turns=1, tokens=2, seconds=0.5, reason="stale"
    )
    taken = BatchTaken(
        step=3, ids=["g"], groups={"t": 1}, trajectories=2, tokens=9, waited_s=0.1, staleness={0: 1, 1: 1}
    )
    write(path, 2.0, ended, taken)
    assert list(read_events(path)) == [ended, taken]
    assert [event.t for event in read_events(path)] == [2.0, 2.0]
    assert list(read_events(path, BatchTaken)) == [taken]


def test_values_that_json_does_not_have_are_left_out_and_the_log_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "events"
    values = {"loss": math.nan, "grad_norm": math.inf, "lr": 0.1}
    write(path, 2.0, StepDone(version=1, seconds=1.0, tokens=9, values=values, tasks={"t": values}))
    (step,) = read_events(path)
    assert isinstance(step, StepDone)
    assert step.values == {"lr": 0.1} == step.tasks["t"]


def test_time_goes_on_across_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "events"
    write(path, 5.0, Warned(message="first life"))
    write(path, 1.0, Warned(message="second life"))
    assert [event.t for event in read_events(path)] == [5.0, 6.0]


@given(cut=st.integers(min_value=1), garbage=st.binary(max_size=40))
def test_a_torn_frame_is_left_out_and_removed_before_more_is_written(
    tmp_path_factory: pytest.TempPathFactory, cut: int, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "events"
    write(path, 1.0, Warned(message="whole"))
    (part,) = path.iterdir()
    frame = part.read_bytes()
    part.write_bytes(frame + frame[: 1 + cut % (len(frame) - 1)] + garbage)
    assert messages(path) == ["whole"]
    write(path, 1.0, Warned(message="after the kill"))
    assert messages(path) == ["whole", "after the kill"]


def test_a_long_log_is_split_into_parts_and_a_resume_continues_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_PART_BYTES", 1000)
    monkeypatch.setattr(event_log, "_FRAME_LINES", 10)
    path, events = tmp_path / "events", sample_run(steps=10)
    write_log(path, events[:500])
    parts = len(list(path.iterdir()))
    assert parts > 3
    write(path, 1.0, Warned(message="a second life"))
    assert len(list(path.iterdir())) in (parts, parts + 1)
    assert list(read_events(path))[:-1] == events[:500]


def test_a_reader_continues_where_it_was_while_the_log_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_PART_BYTES", 200)
    path = tmp_path / "events"
    reader = EventReader(path)
    assert list(reader.read()) == []  # before the log exists
    log = EventLog(path, lambda: 0.0)
    for number in range(20):
        log.emit(Warned(message=str(number)))
        log.flush()
        assert [event.message for event in reader.read() if isinstance(event, Warned)] == [str(number)]
        reader = EventReader(path, position=reader.position)
    log.close()
    assert list(reader.read()) == []


def test_following_a_log_ends_with_the_last_event(tmp_path: Path) -> None:
    path, answers = tmp_path / "events", iter([False, True])
    log = EventLog(path, lambda: 0.0)

    def over() -> bool:
        log.emit(Warned(message="one more"))
        log.flush()
        return next(answers)

    assert len(list(follow(path, over, poll_s=0.0))) == 2
    log.close()


def test_the_log_of_a_real_shape_is_ten_times_smaller_than_its_lines(tmp_path: Path) -> None:
    import msgspec

    path, events = tmp_path / "events", sample_run(steps=40)
    write_log(path, events)
    lines = sum(len(msgspec.json.encode(event)) + 1 for event in events)
    assert sum(part.stat().st_size for part in path.iterdir()) * 8 < lines
    assert len(list(read_events(path, TurnDone))) == sum(isinstance(event, TurnDone) for event in events)


def fill_disk(log: EventLog) -> int:
    """The descriptor of the file that the log had."""
    disk, log._file = log._file, os.open("/dev/full", os.O_WRONLY)
    return disk


def test_while_the_disk_is_full_events_wait_and_are_written_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "events"
    log = EventLog(path, lambda: 0.0)
    log.emit(Warned(message="fits"))
    log.flush()
    disk = fill_disk(log)
    log.emit(Warned(message="waits"))
    with pytest.raises(OSError, match="the disk is full"):
        log.flush()
    log.emit(Warned(message="waits too"))
    log._file = disk
    log.close()
    first, second, warning, last = messages(path)
    assert (first, second, last) == ("fits", "waits", "waits too")
    assert "is full" in warning


def test_a_disk_that_stays_full_is_an_error_of_the_next_event_and_the_log_stays_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "FULL_S", -1.0)
    path = tmp_path / "events"
    log = EventLog(path, lambda: 0.0)
    log.emit(Warned(message="fits"))
    log.flush()
    fill_disk(log)
    log.emit(Warned(message="does not fit"))
    with pytest.raises(OSError, match="No space left"):
        log.flush()
    with pytest.raises(OSError, match="No space left"):
        log.emit(Warned(message="nor does this"))
    log.close()
    assert messages(path) == ["fits"]


KILLED = """
import os, signal, sys
from pathlib import Path
from rollart.core.event_log import EventLog
from rollart.core.events import Warned
log = EventLog(Path(sys.argv[1]), lambda: 0.0)
for number in range(20_000):
    log.emit(Warned(message=str(number)))
    if number == 10_000:
        log.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_keeps_what_was_flushed_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    kept = messages(path)
    assert len(kept) > 10_000
    assert kept == [str(number) for number in range(len(kept))]
