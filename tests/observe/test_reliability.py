import math
import random
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rollart.core import events as ev
from rollart.observe.metrics import measure
from rollart.observe.reliability import FINE, Spread
from rollart.observe.report import report
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


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_a_bucket_of_the_true_one(durations: list[float], share: float) -> None:
    spread = Spread()
    for seconds in durations:
        spread.add(seconds)
    true = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert spread.at(share) == pytest.approx(true, rel=FINE - 1)


def test_what_went_wrong_is_counted_by_task_and_by_function() -> None:
    shot = measure(random.Random(0).sample(LOG, len(LOG)))
    (shop,) = shot.environments
    assert (shop.resets, shop.hedged, shop.won, shop.retried, shop.killed, shop.quarantined) == (100, 2, 1, 1, 2, 1)
    assert shop.reset_s.p50 == pytest.approx(0.5, rel=0.02) and shop.reset_s.p99 == pytest.approx(0.99, rel=0.02)
    (brief,) = shot.rewards
    assert (brief.calls, brief.cold, brief.hedged, brief.retried, brief.failed) == (100, 1, 1, 4, 1)
    assert brief.billed_s == pytest.approx(5.9)
    assert brief.call_s.p50 == pytest.approx(0.1, rel=0.02) and brief.call_s.p99 == pytest.approx(2.0, rel=0.02)


def test_the_report_and_the_summary_tell_it() -> None:
    shot, page = measure(LOG), StringIO()
    Console(file=page, width=80).print(report(shot, 80))
    rows = [line.split() for line in page.getvalue().splitlines()]
    assert "…" not in page.getvalue()
    assert any(row[:2] == ["shop", "100"] and row[-5:] == ["2", "1", "1", "2", "1"] for row in rows)
    assert any(row[:3] == ["brief", "http", "100"] for row in rows)
    told = summarise(shot)
    assert told["environments"][0]["killed"] == 2
    assert told["rewards"][0]["failed"] == 1
