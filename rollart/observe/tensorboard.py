"""The event log as TensorBoard scalars. The x axis is the policy version; a resume hides what it makes again."""

import time
from collections.abc import Iterable
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Record
from tensorboard.compat.proto.event_pb2 import SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rollart.core import events as ev
from rollart.observe.metric_table import METRICS
from rollart.observe.metrics import Metrics


class TensorBoard:
    """A listener of the event log that writes one event file in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("events.out.tfevents.*")))
        self.path = folder / f"events.out.tfevents.{int(time.time())}.rollart.{number}"
        self._file = open(self.path, "wb")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        self._metrics = Metrics()
        self._wall = time.time()
        self._write(Record(wall_time=self._wall, file_version="brain.Event:2"))

    def remember(self, past: Iterable[ev.AnyEvent]) -> None:
        """Replay events that earlier files have, so that counts continue."""
        for event in past:
            self._metrics.fold(event)

    def on_event(self, event: ev.AnyEvent) -> None:
        self._metrics.fold(event)
        wall = self._wall + event.t
        match event:
            case ev.RunStarted():
                if event.wall:
                    self._wall = event.wall - event.t
                if event.resumed:
                    start = SessionLog(status=SessionLog.START)
                    self._write(Record(wall_time=self._wall + event.t, step=event.version + 1, session_log=start))
            case ev.Evaluated():
                self._scalars(wall, event.version, {f"held_out_success/{event.task}": event.success})
            case ev.WarmupStep():
                self._scalars(wall, event.step, {"warmup/loss": event.loss})
            case ev.StepDone():
                self._scalars(wall, event.version, self._step(event))

    def _step(self, event: ev.StepDone) -> dict[str, float]:
        shot = self._metrics.snapshot()
        point = shot.history[-1]
        scalars = {f"trainer/{name}": value for name, value in event.values.items()}
        for task, values in event.tasks.items():
            scalars |= {f"{task}/{name}": value for name, value in values.items()}
        scalars |= {f"logprob_gap/{gap.task}, {gap.age} old": gap.mean for gap in event.gaps}
        scalars |= {f"reward/{task}": value for task, value in point.rewards.items()}
        scalars |= {f"dropped/{reason}": float(dropped) for reason, dropped in shot.drops.items()}
        tags = {metric.name: metric.tag for metric in METRICS}
        scalars |= {tags[name]: value for name, value in point.metrics.items()}
        return scalars | {
            "time/step_s": point.seconds,
            "time/waited_s": point.waited_s,
            "rollout/staleness": point.mean_staleness,
            "busy/engine": shot.recent_use.engine,
            "busy/trainer": shot.recent_use.trainer,
            "busy/environments": shot.recent_use.environments,
        }

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
    board = TensorBoard(folder)
    for event in log:
        board.on_event(event)
    board.close()
    return board.path
