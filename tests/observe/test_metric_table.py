"""A metric is one declaration: the live view, the report, the summary, the steps and TensorBoard pick it up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from sample_run import sample_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rollart.core import events as ev
from rollart.observe import tensorboard
from rollart.observe.live import status
from rollart.observe.metric_table import METRICS, Metric, on
from rollart.observe.metrics import measure
from rollart.observe.report import report
from rollart.observe.screen import screen
from rollart.observe.summary import summarise

CACHE_HITS = Metric(
    name="cache_hits",
    sources=(on(ev.TurnDone, lambda turn: turn.cached / turn.prompt),),
    aggregate="mean",
    show=lambda share: f"{share:.1%} of prompts cached",
    tag="speed/cache_hits",
)


def text(renderable: RenderableType) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


@pytest.fixture
def declared() -> Iterator[list[ev.AnyEvent]]:
    METRICS.append(CACHE_HITS)
    yield sample_run(steps=6)
    METRICS.remove(CACHE_HITS)


def test_a_declared_metric_is_shown_everywhere(declared: list[ev.AnyEvent], tmp_path: Path) -> None:
    shares = [event.cached / event.prompt for event in declared if isinstance(event, ev.TurnDone)]
    recent, overall = sum(shares[-128:]) / 128, sum(shares) / len(shares)
    shot = measure(declared)
    assert f"{recent:.1%} of prompts cached" in text(screen(shot, {}, 80))
    assert f"{overall:.1%} of prompts cached" in text(report(shot, 80))
    assert summarise(shot)["cache_hits"] == pytest.approx(overall, rel=1e-5)
    tensorboard.write(declared, tmp_path)
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    scalars = {scalar.step: scalar.value for scalar in board.Scalars("speed/cache_hits")}
    assert scalars == pytest.approx({point.version: point.metrics["cache_hits"] for point in shot.history})
    assert list(scalars) == list(range(1, 7))


def test_every_metric_has_a_name_and_a_tag_of_its_own() -> None:
    assert len({metric.name for metric in METRICS}) == len({metric.tag for metric in METRICS}) == len(METRICS)


def test_a_metric_without_a_value_is_not_shown(declared: list[ev.AnyEvent]) -> None:
    shot = measure([event for event in declared if not isinstance(event, ev.TurnDone)])
    for page in (text(screen(shot, {}, 80)), text(report(shot, 80)), status(shot)):
        assert "prompts cached" not in page and "tokens/s" not in page  # robots have none
    assert summarise(shot)["cache_hits"] is None
