"""The event log as OpenTelemetry traces: one for each trajectory, with a span for each turn, and one for each step."""

import os
import time
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from rollart.core import events as ev
from rollart.core.errors import RollartError


def otlp() -> SpanExporter:
    """Sends to OTEL_EXPORTER_OTLP_ENDPOINT. Raises RollartError without its package or without an endpoint."""
    if not any(name.startswith("OTEL_EXPORTER_OTLP") for name in os.environ):
        raise RollartError("observe.export names otel: set OTEL_EXPORTER_OTLP_ENDPOINT, e.g. http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise RollartError(
            "observe.export names otel, but its exporter is not installed: pip install 'rollart[otel]'"
        ) from None
    exporter: SpanExporter = OTLPSpanExporter()
    return exporter


class TraceExporter:
    """Spans are made when the log has their end, with the times of the log; a thread of the library sends them."""

    def __init__(self, name: str, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "rollart", "rollart.run": name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("rollart")
        self._wall = time.time()
        self._open: dict[str, trace.Span] = {}

    def on_event(self, event: ev.AnyEvent) -> None:
        match event:
            case ev.RunStarted() if event.wall:
                self._wall = event.wall - event.t
            case ev.TrajectoryStarted():
                about = {"task": event.task, "group": event.group, "version": event.version, "held_out": event.held_out}
                self._open[event.trajectory] = self._start("trajectory", event.t, about | {"id": event.trajectory})
            case ev.EnvironmentReset():
                self._child(event.trajectory, "reset", event.t, event.seconds)
            case ev.TurnDone():
                self._turn(event)
            case ev.Scored():
                self._child(event.trajectory, "score", event.t, event.seconds)
            case ev.TrajectoryEnded() if event.trajectory in self._open:
                self._end(event)
            case ev.StepDone():
                self._span("step", event.t, event.seconds, {"version": event.version, **event.values})
            case ev.Published():
                self._span("publish", event.t, event.seconds, {"version": event.version})
            case ev.EngineSwapped():
                self._span("swap", event.t, event.seconds, {"engine": event.engine, "version": event.version})
            case ev.Checkpointed():
                self._span("checkpoint", event.t, event.seconds, {"version": event.version})

    def _turn(self, event: ev.TurnDone) -> None:
        acted = event.t - event.env_s
        about = {"engine": event.engine, "prompt": event.prompt, "cached": event.cached, "tokens": event.tokens}
        self._child(event.trajectory, "generate", acted, event.generate_s, about | {"turn": event.turn})
        if event.env_s:
            self._child(event.trajectory, "environment step", event.t, event.env_s, {"turn": event.turn})

    def _end(self, event: ev.TrajectoryEnded) -> None:
        span = self._open.pop(event.trajectory)
        span.set_attributes({"outcome": event.outcome.value, "turns": event.turns, "tokens": event.tokens})
        if event.reward is not None:
            span.set_attribute("reward", event.reward)
        if not event.outcome.trainable:
            span.set_status(trace.StatusCode.ERROR, event.reason)
        span.end(self._ns(event.t))

    def _ns(self, t: float) -> int:
        return int((self._wall + t) * 1e9)

    def _start(self, name: str, t: float, about: dict[str, Any], parent: trace.Span | None = None) -> trace.Span:
        context = None if parent is None else trace.set_span_in_context(parent)
        return self._tracer.start_span(name, context=context, start_time=self._ns(t), attributes=about)

    def _child(self, id: str, name: str, end: float, seconds: float, about: dict[str, Any] | None = None) -> None:
        if id in self._open:
            self._start(name, end - seconds, about or {}, self._open[id]).end(self._ns(end))

    def _span(self, name: str, end: float, seconds: float, about: dict[str, Any]) -> None:
        self._start(name, end - seconds, about).end(self._ns(end))

    def close(self) -> None:
        """What was under way stays without an end in the log, and is not exported."""
        self._provider.shutdown()
