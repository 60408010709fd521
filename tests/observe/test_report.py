from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from dashboard_runs import imitation_log, sampling_log
from rich.console import Console, RenderableType
from sample_run import sample_run

from rollart.core import events as ev
from rollart.core.events import Quarantined, Released, RunStarted
from rollart.core.types import LogprobGap
from rollart.observe import curves
from rollart.observe.metrics import Metrics, measure
from rollart.observe.report import logprob_gaps, report, results, scores, wilson
from rollart.observe.snapshot import StepPoint
from rollart.observe.summary import summarise


def text(renderable: RenderableType, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_the_report_answers_the_questions_of_a_reader() -> None:
    page = text(report(measure(sample_run()), 80))
    for words in (
        "Success on held-out",
        "Learning curves",
        "Dropped",
        "env_failed",
        "stale",
        "Slowest",
        "generate",
        "bound 1",
    ):
        assert words in page
    assert "…" not in page


@pytest.mark.parametrize("width", [80, 100])
def test_the_report_fits(width: int) -> None:
    assert max(map(len, text(report(measure(sample_run()), width), width).splitlines())) <= width


def test_any_beginning_of_a_log_can_be_shown() -> None:
    log = sample_run(steps=4)
    metrics = Metrics()
    text(report(metrics.snapshot(), 80))
    for number, event in enumerate(log):
        metrics.fold(event)
        if number % 50 == 0:
            assert "sample" in text(report(metrics.snapshot(), 80))


@pytest.mark.parametrize("work", ["train", "dpo", "reward-model"])
def test_the_results_are_before_and_after(work: str) -> None:
    shot = replace(measure(sample_run(steps=10)), work=work)
    rows = [line.split() for line in text(results(shot)).splitlines()]
    low, high = (f"{end:.2f}" for end in wilson(0.986, 8))
    assert ["frozen_lake", "0.100", "0.986", low, "to", high, "x", "0.02", "8", "0"] in rows


def test_an_evaluation_comes_with_its_interval() -> None:
    assert "0.986" in text(scores(measure(sample_run(steps=10))))
    low, high = wilson(1.0, 8)
    assert (round(low, 3), high) == (0.676, 1.0)
    assert wilson(0.5, 0) == (0.0, 1.0)


@pytest.mark.parametrize("steps", [1, 30])
def test_the_curves_are_a_picture(tmp_path: Path, steps: int) -> None:
    curves.write(measure(sample_run(steps=steps)), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_step_still_has_a_picture(tmp_path: Path) -> None:
    curves.write(Metrics().snapshot(), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_labels_of_equal_curves_do_not_lie_on_each_other() -> None:
    placed = sorted(curves._spread([0.9, 0.9, 0.91], 0.06))
    assert all(high - low >= 0.06 - 1e-9 for low, high in pairwise(placed))


def point(version: int, *rows: LogprobGap) -> StepPoint:
    return StepPoint(version, float(version), 1.0, 0.0, 10, 1, {}, {}, {}, {}, rows)


def gap_rows(history: list[StepPoint]) -> list[list[str]]:
    return [line.split() for line in text(logprob_gaps(history)).splitlines()[2:]]


def test_mean_gaps_are_over_tokens_and_the_last_step_is_the_last_that_had_any() -> None:
    history = [point(1, LogprobGap("a", 0, 300, 0.2, 0.5)), point(2, LogprobGap("a", 0, 100, 0.6, 0.4)), point(3)]
    assert gap_rows(history) == [["a", "0", "400", "0.3", "0.5", "0.6"]]


def test_each_task_and_age_has_a_row_of_gaps() -> None:
    rows = gap_rows(list(measure(sample_run(steps=3)).history))
    names = [(task, age) for task in ("arithmetic", "frozen_lake", "sokoban") for age in ("0", "1")]
    assert [tuple(row[:2]) for row in rows] == names
    assert all(row[2] == "600" for row in rows)


def test_a_task_that_is_out_at_the_end_stays_in_the_table_and_in_the_summary_with_the_reason() -> None:
    log = [*sample_run(steps=10)]
    started = next(event for event in log if isinstance(event, RunStarted))
    task = started.tasks[0]
    shot = measure([*log, Quarantined(task=task, reason="20 of its last 20 trajectories failed", wait_s=30.0)])
    printed = text(results(shot))
    assert task in printed and "20 of its last 20 trajectories failed" in " ".join(printed.split())
    assert summarise(shot)["tasks"][task]["out"] == "20 of its last 20 trajectories failed"
    back = measure([*log, Quarantined(task=task, reason="why", wait_s=30.0), Released(task=task, seconds=40.0)])
    assert "out" not in summarise(back)["tasks"][task]


def test_a_task_that_was_never_evaluated_stays_in_the_table() -> None:
    started = RunStarted(name="r", preset="rollart", alpha=1, seed=0, steps=1, tasks=["never"])
    assert "never" in text(results(measure([started])))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (imitation_log(), ("imitation, seed 0", "first", "last")),
        (sampling_log(), ("sample, seed 0", "pass@4", "Failed")),
    ],
)
def test_a_run_without_rl_is_not_described_in_its_words(log: list[ev.AnyEvent], said: tuple[str, ...]) -> None:
    page = text(report(measure(log)))
    for words in said:
        assert words in page
    for words in ("RL", "held-out", "alpha", "never trained"):
        assert words not in page
    for score in (event for event in log if isinstance(event, ev.Evaluated)):
        assert f"{score.success:.3f}" in page
