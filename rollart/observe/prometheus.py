"""A scrape endpoint for Prometheus, on loopback. Engines have the names that vLLM gives its own metrics.

The event loop's thread folds events, the endpoint's thread collects; they share the metrics under one lock.
"""

import threading
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rollart.core import events as ev
from rollart.observe.metrics import Metrics

# Name, help, field of EngineSample; counters end in _total on the wire.
_GAUGES = (
    ("vllm:num_requests_running", "Requests in the running batch.", "running"),
    ("vllm:num_requests_waiting", "Requests that wait for the batch.", "waiting"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens that were prefilled.", "prefilled"),
    ("vllm:generation_tokens", "Tokens that were sampled.", "generated"),
)


class PrometheusExporter:
    """`port` 0 takes any that is free; `port` is then the one it got. `past` are the events of a resumed run."""

    def __init__(self, port: int, past: Iterable[ev.AnyEvent] = ()) -> None:
        self._lock = threading.Lock()
        self._metrics = Metrics()
        self._engines: dict[str, ev.EngineSample] = {}
        for event in past:
            self.on_event(event)
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        self.port: int = self._server.server_port

    def on_event(self, event: ev.AnyEvent) -> None:
        with self._lock:
            self._metrics.fold(event)
            if isinstance(event, ev.EngineSample):
                self._engines[event.engine] = event

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            shot, engines = self._metrics.snapshot(), dict(self._engines)
        yield from _engine_metrics(engines)
        for name, text, value in (
            ("rollart_step", "Optimizer steps done.", float(shot.step)),
            ("rollart_ready_trajectories", "Trajectories that wait for their batch.", float(shot.pipeline.ready)),
            ("rollart_running_trajectories", "Trajectories under way.", float(shot.pipeline.running)),
            ("rollart_trainer_busy_ratio", "Share of the last half minute.", shot.recent_use.trainer),
            ("rollart_engines_busy_ratio", "Share of the last half minute.", shot.recent_use.engine),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        yield CounterMetricFamily("rollart_trainer_waited_seconds", "Waits for a batch.", value=shot.waited_s)
        reward = GaugeMetricFamily("rollart_reward", "Mean of the last trajectories.", labels=["task"])
        success = GaugeMetricFamily("rollart_held_out_success", "Newest evaluation.", labels=["task"])
        ended = CounterMetricFamily("rollart_trajectories", "Ended ones.", labels=["task", "outcome"])
        for task in shot.tasks:
            if task.reward is not None:
                reward.add_metric([task.name], task.reward)
            if task.now is not None:
                success.add_metric([task.name], task.now.success)
            for outcome, number in task.outcomes.items():
                ended.add_metric([task.name, outcome], number)
        yield from (reward, success, ended)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)


def _engine_metrics(engines: dict[str, ev.EngineSample]) -> Iterable[Metric]:
    for name, text, field in _GAUGES:
        gauge = GaugeMetricFamily(name, text, labels=["engine"])
        for engine, sample in engines.items():
            gauge.add_metric([engine], getattr(sample, field))
        yield gauge
    used = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV budget, 1 is all.", labels=["engine"])
    for engine, sample in engines.items():
        if sample.kv_budget:
            used.add_metric([engine], sample.kv_bytes / sample.kv_budget)
    yield used
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(name, text, labels=["engine"])
        for engine, sample in engines.items():
            counter.add_metric([engine], getattr(sample, field))
        yield counter
