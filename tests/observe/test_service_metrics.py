import random
from io import StringIO

import pytest
from rich.console import Console

from rollart.core import events as ev
from rollart.observe.metrics import measure
from rollart.observe.report import report
from rollart.observe.service_metrics import SwapMetrics
from rollart.observe.summary import summarise


def reset(seconds: float) -> ev.EnvironmentReset:
    return ev.EnvironmentReset(trajectory="t", task="shop", seconds=seconds)


def called(seconds: float, **more: object) -> ev.RewardCalled:
    about = {"trajectory": "t", "task": "shop", "function": "mine:brief", "invoker": "http", "tries": 1}
    return ev.RewardCalled(seconds=seconds, **(about | more))


LOG = [
    *(reset(n / 100) for n in range(1, 101)),
    ev.ResetHedged(task="shop", won=True),
    ev.ResetHedged(task="shop", won=False),
    ev.EnvironmentLost(task="shop", call="reset", reason="it hung", retried=True),
    ev.EnvironmentLost(task="shop", call="step", reason="it hung"),
    ev.Quarantined(task="shop", reason="it hangs", wait_s=30.0),
    *(called(0.1, billed_s=0.05) for _ in range(98)),
    called(2.0, tries=3, hedges=1, cold=True, billed_s=1.0),
    called(9.0, tries=3, reason="HTTP 500"),
]


def test_what_went_wrong_is_counted_by_task_and_by_function() -> None:
    shot = measure(random.Random(0).sample(LOG, len(LOG)))
    (shop,) = shot.environments
    assert (shop.resets, shop.hedged, shop.won, shop.retried, shop.killed, shop.quarantined) == (100, 2, 1, 1, 2, 1)
    assert shop.reset_s.p50 == pytest.approx(0.5, rel=0.02) and shop.reset_s.p99 == pytest.approx(0.99, rel=0.02)
    (brief,) = shot.rewards
    assert (brief.calls, brief.cold, brief.hedged, brief.retried, brief.failed) == (100, 1, 1, 4, 1)
    assert brief.billed_s == pytest.approx(5.9)
    assert brief.call_s.p50 == pytest.approx(0.1, rel=0.02) and brief.call_s.p99 == pytest.approx(2.0, rel=0.02)


def test_the_report_and_the_summary_show_it() -> None:
    shot, page = measure(LOG), StringIO()
    Console(file=page, width=80).print(report(shot, 80))
    rows = [line.split() for line in page.getvalue().splitlines()]
    assert "…" not in page.getvalue()
    assert any(row[:2] == ["shop", "100"] and row[-5:] == ["2", "1", "1", "2", "1"] for row in rows)
    assert any(row[:3] == ["brief", "http", "100"] for row in rows)
    summary = summarise(shot)
    assert summary["environments"][0]["killed"] == 2
    assert summary["rewards"][0]["failed"] == 1


def swap(engine: str, version: int, transport: str = "http", **values: float) -> ev.EngineSwapped:
    return ev.EngineSwapped(engine=engine, version=version, seconds=1.0, transport=transport, **values)  # type: ignore[arg-type]


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


def test_the_report_shows_what_new_weights_cost() -> None:
    shot = measure([swap("engine-0", 1, "shared memory", transfer_s=0.0123, exposed_s=0.00045, bytes=5 << 20)])
    page = StringIO()
    Console(file=page, width=100).print(report(shot))
    shown = page.getvalue()
    assert "New weights, while generation went on" in shown
    row = next(line for line in shown.splitlines() if line.startswith("engine-0"))
    assert row.split() == ["engine-0", "shared", "memory", "1", "5.0", "12.3", "ms", "0.45", "ms", "0", "ms", "0"]
