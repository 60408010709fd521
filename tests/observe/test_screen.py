import pytest
from rich.console import Console
from sample_run import sample_run

from rollart.core import events as ev
from rollart.observe.metrics import Metrics
from rollart.observe.screen import screen

LONG = "a_task_with_a_name_that_is_longer_than_anybody_would_write"


def drawn(metrics: Metrics, width: int) -> list[str]:
    console = Console(width=400, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    console.print(screen(metrics.snapshot(), {"frozen_lake": 1, "sokoban": 1, "arithmetic": 2}, width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 300])
@pytest.mark.parametrize("task", ["frozen_lake", LONG])
def test_no_line_is_wider_than_the_terminal_at_any_moment(width: int, task: str) -> None:
    metrics = Metrics()
    for number, event in enumerate(sample_run(steps=10, tasks={task: 3, "sokoban": 9, "arithmetic": 1})):
        metrics.fold(event)
        if number % 97 == 0:
            assert max(map(len, drawn(metrics, width))) <= width
    metrics.fold(ev.Warned(message="something odd " * 30))
    assert max(map(len, drawn(metrics, width))) <= width


def test_a_long_warning_is_wrapped_so_that_its_advice_is_seen() -> None:
    metrics = Metrics()
    metrics.fold(ev.Warned(message=f"drift: {'words ' * 20}: lower training.lr. {'evidence ' * 90}"))
    page = drawn(metrics, 80)
    assert any("lower training.lr" in line for line in page) and sum("evidence" in line for line in page) < 4


def test_the_screen_tells_what_matters() -> None:
    metrics = Metrics()
    log = sample_run(steps=20)
    for event in log[
        : next(i for i, event in enumerate(log) if isinstance(event, ev.StepDone) and event.version == 15)
    ]:
        metrics.fold(event)
    text = "\n".join(drawn(metrics, 80))
    for words in (
        "step 14/20",
        "ETA",
        "frozen_lake",
        "50%",
        "0.10 → 0.89",
        "running",
        "engine",
        "trainer waits",
        "env_failed",
    ):
        assert words in text
    assert "…" not in text


def test_the_warmup_shows_its_progress_and_loss() -> None:
    metrics = Metrics()
    metrics.fold(ev.WarmupStep(step=60, steps=600, loss=1.25))
    assert "warmup 60/600 · loss 1.250" in drawn(metrics, 80)[1]


def test_an_empty_log_can_be_drawn() -> None:
    assert drawn(Metrics(), 80)
