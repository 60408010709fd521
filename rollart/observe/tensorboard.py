"""The event log as TensorBoard scalars. The x axis is the policy version; a resume hides what it makes again."""

import time
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rollart.core import events as ev
from rollart.observe.metrics import Metrics
from rollart.observe.scalars import ScalarLog


class TensorBoard:
    """A listener that writes one event file in `folder`, from `metrics` that have folded the event already."""

    def __init__(self, folder: Path, metrics: Metrics) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("events.out.tfevents.*")))
        self.path = folder / f"events.out.tfevents.{int(time.time())}.rollart.{number}"
        self._file = open(self.path, "wb")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        self._log = ScalarLog(metrics)
        self._wall = time.time()
        self._write(Record(wall_time=self._wall, file_version="brain.Event:2"))

    def on_event(self, event: ev.AnyEvent) -> None:
        if isinstance(event, ev.RunStarted):
            if event.wall:
                self._wall = event.wall - event.t
            if event.resumed:
                start = SessionLog(status=SessionLog.START)
                self._write(Record(wall_time=self._wall + event.t, step=event.version + 1, session_log=start))
        found = self._log.of(event)
        if found is not None:
            self._scalars(self._wall + event.t, *found)

    def _scalars(self, wall: float, step: int, scalars: dict[str, float]) -> None:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Record(wall_time=wall, step=step, summary=Summary(value=values)))
        self._file.flush()

    def _write(self, record: Record) -> None:
        self._writer.write(record.SerializeToString())

    def close(self) -> None:
        self._writer.close()


def write(log: Iterable[ev.AnyEvent], folder: Path) -> Path:
    """The whole log as one event file."""
    metrics = Metrics()
    board = TensorBoard(folder, metrics)
    for event in log:
        metrics.fold(event)
        board.on_event(event)
    board.close()
    return board.path
