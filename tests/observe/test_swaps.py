from rich.console import Console

from rollart.core.events import EngineSwapped
from rollart.observe.metrics import measure
from rollart.observe.report import report
from rollart.observe.swaps import SwapMetrics


def swap(engine: str, version: int, transport: str = "http", **values: float) -> EngineSwapped:
    return EngineSwapped(engine=engine, version=version, seconds=1.0, transport=transport, **values)  # type: ignore[arg-type]


def test_swaps_are_averaged_by_engine_and_transport() -> None:
    metrics = SwapMetrics()
    for event in (
        swap("a", 1, transfer_s=1.0, exposed_s=0.1, bytes=10),
        swap("a", 2, transfer_s=3.0, exposed_s=0.3, bytes=30),
        swap("a", 3, "shared memory", transfer_s=0.5),
        swap("b", 3, recomputed=7, recompute_s=0.5),
    ):
        metrics.add(event)
    first, near, other = metrics.snapshot()
    assert (first.engine, first.transport, first.number, first.bytes, first.transfer_s) == ("a", "http", 2, 20, 2.0)
    assert first.exposed_s == 0.2
    assert (near.transport, near.transfer_s) == ("shared memory", 0.5)
    assert (other.engine, other.recomputed, other.recompute_s) == ("b", 7, 0.5)


def test_the_report_tells_what_new_weights_cost() -> None:
    shot = measure([swap("engine-0", 1, "shared memory", transfer_s=0.0123, exposed_s=0.00045, bytes=5 << 20)])
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report(shot))
    shown = console.export_text()
    assert "New weights, while generation went on" in shown
    row = next(line for line in shown.splitlines() if line.startswith("engine-0"))
    assert row.split() == ["engine-0", "shared", "memory", "1", "5.0", "12.3", "0.45", "0.0", "0"]
