from rich.console import Console
from sample_run import sample_run

from rollart.core.types import LogprobGap
from rollart.observe.logprob_gap_table import gaps
from rollart.observe.metrics import measure
from rollart.observe.snapshot import StepPoint


def point(version: int, *rows: LogprobGap) -> StepPoint:
    return StepPoint(version, float(version), 1.0, 0.0, 10, 1, {}, 1.0, {}, {}, rows)


def lines(history: list[StepPoint]) -> list[list[str]]:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(gaps(history))
    return [line.split() for line in console.export_text().splitlines()[2:]]


def test_means_are_over_tokens_and_the_last_step_is_the_last_that_had_any() -> None:
    history = [point(1, LogprobGap("a", 0, 300, 0.2, 0.5)), point(2, LogprobGap("a", 0, 100, 0.6, 0.4)), point(3)]
    assert lines(history) == [["a", "0", "400", "0.3", "0.5", "0.6"]]


def test_each_task_and_age_has_a_row() -> None:
    rows = lines(list(measure(sample_run(steps=3)).history))
    names = [(task, age) for task in ("arithmetic", "frozen_lake", "sokoban") for age in ("0", "1")]
    assert [tuple(row[:2]) for row in rows] == names
    assert all(row[2] == "600" for row in rows)
