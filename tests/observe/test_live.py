import io
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from sample_run import sample_run

from rollart.core import events as ev
from rollart.core.event_log import EventLog
from rollart.observe.live import LiveView, PlainView, status, view
from rollart.observe.metrics import measure
from rollart.observe.report import report

WEIGHTS = {"frozen_lake": 1.0, "sokoban": 1.0, "arithmetic": 1.0}


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=30, color_system=None, _environ={})


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_the_screen_and_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert isinstance(view(terminal(), WEIGHTS), LiveView)
    assert isinstance(view(Console(file=io.StringIO()), WEIGHTS), PlainView)
    monkeypatch.setenv("CI", "1")
    assert isinstance(view(terminal(), WEIGHTS), PlainView)


def test_the_last_frame_stays_on_the_terminal_and_the_thread_ends() -> None:
    console = terminal()
    with LiveView(console, WEIGHTS) as live:
        for event in sample_run(steps=10):
            live.on_event(event)
    assert not live._thread.is_alive()
    assert "finished · step 10/10" in text(console)


def test_a_resumed_run_keeps_its_history() -> None:
    console = terminal()
    log = sample_run(steps=10)
    with LiveView(console, WEIGHTS) as live:
        live.remember(log[:-1])
        live.on_event(log[-1])
    assert "0.10 → 0.99" in text(console)


def test_an_error_in_drawing_does_not_stop_the_run_but_is_raised_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError), LiveView(terminal(), WEIGHTS) as live:
        monkeypatch.setattr(live, "_frame", lambda: 1 / 0)
        live.on_event(sample_run(steps=1)[0])
        live._thread.join(timeout=30)
        live.on_event(sample_run(steps=1)[1])


def test_an_error_of_the_run_is_not_hidden() -> None:
    with pytest.raises(KeyError, match="mine"), LiveView(terminal(), WEIGHTS):
        raise KeyError("mine")


def test_plain_lines_come_every_ten_seconds_and_for_what_matters(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    ticks = iter(i / 4 for i in range(10_000))
    log = EventLog(tmp_path / "events", lambda: next(ticks))
    with PlainView(console) as plain:
        log.subscribe(plain.on_event)
        log.emit(ev.RunStarted(name="x", preset="rollart", alpha=1, seed=0, steps=10, tasks=["a"]))
        for step in range(1, 101):
            log.emit(ev.WarmupStep(step=step, steps=100, loss=2.0))
        log.emit(ev.Evaluated(version=0, task="a", episodes=8, success=0.5, reward=0.5, failed=0))
        log.emit(ev.GroupStarted(group="g", task="a", seed=1, members=1, version=0))
        for version in (1, 2):
            log.emit(ev.StepDone(version=version, seconds=0.25, tokens=10, values={}, tasks={}))
        log.emit(ev.Warned(message="careful"))
        log.emit(ev.RunEnded(version=10, reason="finished"))
    log.close()
    lines = text(console).splitlines()
    assert sum("warmup" in line for line in lines) == 2
    assert [line.split("] ")[1].partition(",")[0] for line in lines[-4:]] == [
        "version 0: a 0.500 on 8 held-out episodes",
        "step 1/10",
        "warning: careful",
        "ended at version 10: finished",
    ]


def test_a_tuning_of_robots_shows_neither_engines_nor_tokens() -> None:
    log = sample_run(steps=10)
    robots = [replace(event, work="tuning") if isinstance(event, ev.RunStarted) else event for event in log]
    for events, named in ((log, True), (robots, False)):
        console, printed = terminal(), Console(file=io.StringIO(), width=80)
        with LiveView(console, WEIGHTS) as live:
            for event in events:
                live.on_event(event)
        printed.print(report(live.metrics.snapshot(), 80))
        assert ("engine " in text(console)) == ("tokens/s" in text(console)) == named
        assert ("engine busy" in text(printed)) == ("tokens/s" in text(printed)) == named
        assert "trainer" in text(console) and "trajectories/s" in text(console)


@pytest.mark.parametrize("work", ["imitation", "sft"])
def test_supervised_training_shows_its_loss_and_no_reward(work: str) -> None:
    started = ev.RunStarted(
        name="run", preset=work, alpha=0, seed=0, steps=9, tasks=["task"], version=0, resumed=False, wall=0.0,
        model="meanflow", work=work,
    )  # fmt: skip
    assert status(measure([started, ev.WarmupStep(step=4, steps=9, loss=0.25)])) == "step 4/9, loss 0.250"
