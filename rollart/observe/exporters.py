"""Where the numbers of a run go besides its folder: one small class for each destination, and a table of them.

An exporter is a listener of the event log. It runs in the thread of the event loop, so slow work goes to threads of its
library; one that raises is removed, and the run goes on without it.
"""

import contextlib
import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollart.core import events as ev
from rollart.core.errors import RollartError
from rollart.core.event_log import read_events
from rollart.observe.metrics import Metrics
from rollart.observe.scalars import ScalarLog


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """The run that is exported. When an exporter gets an event, `metrics` have folded it, and all before it. `port` is
    that of Prometheus' scrape endpoint."""

    folder: Path
    name: str
    metrics: Metrics
    port: int = 9464


class Exporter(Protocol):
    def on_event(self, event: ev.AnyEvent) -> None: ...

    def close(self) -> None: ...


class ScalarExporter(ABC):
    """Scalars by version, for a library that takes a dict of them."""

    def __init__(self, target: ExportTarget) -> None:
        self._scalars = ScalarLog(target.metrics)

    def on_event(self, event: ev.AnyEvent) -> None:
        found = self._scalars.of(event)
        if found is not None:
            self.write(*found)

    @abstractmethod
    def write(self, step: int, scalars: dict[str, float]) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def library(name: str, extra: str) -> Any:
    """Raises RollartError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        text = f"observe.export names {extra}, but the package {name} is not installed: pip install 'rollart[{extra}]'"
        raise RollartError(text) from None


class WandbExporter(ScalarExporter):
    """Offline unless WANDB_MODE says otherwise: a run never waits for a network. `wandb sync` uploads it later."""

    def __init__(self, target: ExportTarget) -> None:
        super().__init__(target)
        os.environ.setdefault("WANDB_SILENT", "true")
        mode = os.environ.get("WANDB_MODE", "offline")
        self._wandb = library("wandb", "wandb")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rollart"), name=target.name, dir=str(target.folder), mode=mode
        )
        # Evaluations end after later steps began, so versions are an axis of their own, not W&B's growing step.
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._run.log({"version": step, **scalars})

    def close(self) -> None:
        """`finish` returns before W&B's own process has written everything; `teardown` waits for it."""
        self._run.finish()
        self._wandb.teardown()


class MlflowExporter(ScalarExporter):
    """Into MLFLOW_TRACKING_URI, by default a file store in the run folder."""

    def __init__(self, target: ExportTarget) -> None:
        super().__init__(target)
        tracking = library("mlflow.tracking", "mlflow")
        self._entities = library("mlflow.entities", "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI", (target.folder.absolute() / "mlflow").as_uri())
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = tracking.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("rollart")
        experiment = found.experiment_id if found else self._client.create_experiment("rollart")
        self._id = self._client.create_run(experiment, run_name=target.name).info.run_id
        self._t = 0.0

    def on_event(self, event: ev.AnyEvent) -> None:
        self._t = event.t
        super().on_event(event)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        at = int(self._t * 1000)
        metrics = [self._entities.Metric(_plain(name), value, at, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioExporter(ScalarExporter):
    """Into trackio's own folder, where `trackio show` finds it. Its messages go to stderr: stdout is the command's."""

    def __init__(self, target: ExportTarget) -> None:
        super().__init__(target)
        self._trackio = library("trackio", "trackio")
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.init(project="rollart", name=target.name, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._trackio.log(scalars, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


def _plain(name: str) -> str:
    """MLflow allows no commas in names."""
    return name.replace(",", "")


def _tensorboard(target: ExportTarget) -> Exporter:
    from rollart.observe.tensorboard import TensorBoard

    return TensorBoard(target.folder / "tensorboard", target.metrics)


def _prometheus(target: ExportTarget) -> Exporter:
    library("prometheus_client", "prometheus")
    from rollart.observe.prometheus import PrometheusExporter

    return PrometheusExporter(target.port, read_events(target.folder / "events"))


def _otel(target: ExportTarget) -> Exporter:
    library("opentelemetry.sdk.trace", "otel")
    from rollart.observe.traces import TraceExporter, otlp

    return TraceExporter(target.name, otlp())


EXPORTERS: dict[str, Callable[[ExportTarget], Exporter]] = {
    "tensorboard": _tensorboard,
    "wandb": WandbExporter,
    "mlflow": MlflowExporter,
    "trackio": TrackioExporter,
    "prometheus": _prometheus,
    "otel": _otel,
}
