"""What a run file may say of agents, and what is shown of them."""

from pathlib import Path

import pytest
from rich.console import Console

from rollart.app import preflight
from rollart.config import loading
from rollart.core.errors import ConfigError
from rollart.core.events import AgentPlayed, RunStarted
from rollart.observe.metrics import measure
from rollart.observe.report import report
from rollart.observe.summary import summarise

RUN = """
model: {tiny: {hidden: 32, layers: 1, context: 2048}}
tasks:
  - name: t
    %s
"""


def load(tmp_path: Path, task: str) -> loading.RunFile:
    path = tmp_path / "run.yaml"
    path.write_text(RUN % task)
    return preflight.load_run(path)


def test_an_agent_may_be_a_name_or_a_section_and_survives_a_round_trip(tmp_path: Path) -> None:
    short = load(tmp_path, "agent: rollart.agents.demo:digits")
    long = load(tmp_path, "agent: {function: rollart.agents.demo:digits, max_calls: 3}")
    assert short.tasks[0].agent is not None and long.tasks[0].agent is not None
    assert (short.tasks[0].agent.max_calls, long.tasks[0].agent.max_calls) == (200, 3)
    again = tmp_path / "again.yaml"
    again.write_text(loading.dump(long))
    assert preflight.load_run(again) == long


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("agent: rollart.agents.demo:digit", "did you mean 'digits'"),
        ("agent: no_such_module:play", "no_such_module"),
        ("weight: 2", "needs either `env`, `agent` or `dataset`"),
        ("agent: {functoin: rollart.agents.demo:digits}", "function"),
    ],
)
def test_an_invalid_agent_is_an_error_that_names_the_line(tmp_path: Path, task: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        load(tmp_path, task)
    assert sentence in str(wrong.value) and "run.yaml:" in str(wrong.value)


def test_the_report_counts_what_agents_did_in_training_only() -> None:
    counts = {"requests": 7, "completions": 6, "segments": 3, "forks": 2, "retries": 1, "undelivered": 1}
    played = AgentPlayed(trajectory="t-0.0", task="t", mismatches=4, **counts)
    other = AgentPlayed(trajectory="e.0", task="t", mismatches=4, held_out=True, **counts)
    started = RunStarted(name="r", preset="rollart", alpha=1, seed=0, steps=1, tasks=["t", "plain"])
    shot = measure([started, played, played, other])
    assert shot.task("t").agent == {**{name: 2 * n for name, n in counts.items()}, "mismatches": 8}
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report(shot))
    text = console.export_text()
    assert "What agents did with their history" in text and "undelivered" in text
    assert summarise(shot)["tasks"]["t"]["agent"]["forks"] == 4
