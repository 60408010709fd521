"""Every exporter against its real library."""

import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from sample_run import sample_run

from rollart.core import events as ev
from rollart.core.errors import RollartError
from rollart.observe import exporters
from rollart.observe.exporters import EXPORTERS, Exporter, ExportTarget, ScalarExporter
from rollart.observe.metrics import Metrics, measure

LOG = sample_run(steps=6)


def play(exporter: Exporter, metrics: Metrics | None = None) -> None:
    for event in LOG:
        if metrics is not None:
            metrics.fold(event)
        exporter.on_event(event)


def test_scalars_of_a_resumed_run_continue_and_are_not_written_twice() -> None:
    written: list[int] = []

    class Kept(ScalarExporter):
        def write(self, step: int, scalars: dict[str, float]) -> None:
            if "time/step_s" in scalars:
                written.append(step)

        def close(self) -> None:
            pass

    half = next(n for n, event in enumerate(LOG) if isinstance(event, ev.StepDone) and event.version == 3) + 1
    metrics = Metrics()
    kept = Kept(ExportTarget(Path(), "sample", metrics))
    for number, event in enumerate(LOG):
        metrics.fold(event)
        if number >= half:
            kept.on_event(event)
    assert written == [4, 5, 6]


def test_prometheus_scrapes_the_numbers_of_the_log_under_the_names_of_vllm() -> None:
    pytest.importorskip("prometheus_client")
    from rollart.observe.prometheus import PrometheusExporter

    exporter = PrometheusExporter(0)
    try:
        play(exporter)
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=20) as reply:
            lines = reply.read().decode().splitlines()
    finally:
        exporter.close()
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    last = [event for event in LOG if isinstance(event, ev.EngineSample)][-1]
    assert values[f'vllm:num_requests_running{{engine="{last.engine}"}}'] == last.running
    assert values[f'vllm:generation_tokens_total{{engine="{last.engine}"}}'] == last.generated
    assert values["rollart_step"] == 6
    task = measure(LOG).tasks[0]
    assert task.now is not None
    assert values[f'rollart_held_out_success{{task="{task.name}"}}'] == pytest.approx(task.now.success)


def test_every_ended_trajectory_is_a_trace_whose_turns_are_its_children() -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from rollart.observe.traces import TraceExporter

    spans = memory.InMemorySpanExporter()
    exporter = TraceExporter("sample", spans)
    play(exporter)
    exporter.close()
    found = spans.get_finished_spans()
    ended = [event for event in LOG if isinstance(event, ev.TrajectoryEnded)]
    roots = {span.context.span_id: span for span in found if span.name == "trajectory"}
    assert {span.attributes["id"] for span in roots.values()} == {event.trajectory for event in ended}
    turns = [span for span in found if span.name == "generate"]
    assert len(turns) == sum(isinstance(event, ev.TurnDone) for event in LOG)
    assert all(span.parent.span_id in roots for span in turns)
    assert sum(span.name == "step" for span in found) == 6


@pytest.mark.slow
def test_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics = Metrics()
    exporter = EXPORTERS["wandb"](ExportTarget(tmp_path, "sample", metrics))
    play(exporter, metrics)
    exporter.close()
    (written,) = tmp_path.rglob("*.wandb")
    assert written.stat().st_size > 1000


def test_mlflow_keeps_every_step_in_a_file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    metrics = Metrics()
    exporter = EXPORTERS["mlflow"](ExportTarget(tmp_path, "sample", metrics))
    play(exporter, metrics)
    exporter.close()
    assert isinstance(exporter, exporters.MlflowExporter)
    history = exporter._client.get_metric_history(exporter._id, "time/step_s")
    assert [point.step for point in history] == [1, 2, 3, 4, 5, 6]


def test_spans_arrive_at_a_collector_over_otlp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    names: list[str] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                names.extend(span.name for scope in part.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not on the terminal of the tests."""

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        exporter = EXPORTERS["otel"](ExportTarget(tmp_path, "sample", Metrics()))
        play(exporter)
        exporter.close()
    finally:
        server.shutdown()
        thread.join(timeout=20)
        server.server_close()
    assert {"trajectory", "generate", "step", "publish"} <= set(names)


def test_trackio_takes_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when it is imported
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    metrics = Metrics()
    exporter = EXPORTERS["trackio"](ExportTarget(tmp_path, "sample", metrics))
    play(exporter, metrics)
    exporter.close()
    rows = SQLiteStorage.get_logs("rollart", "sample")
    assert [row["step"] for row in rows if "time/step_s" in row] == [1, 2, 3, 4, 5, 6]


def test_a_missing_package_is_a_sentence_with_the_extra_to_install() -> None:
    with pytest.raises(RollartError, match=r"pip install 'rollart\[trackio\]'"):
        exporters.library("no_such_package_of_ours", "trackio")
