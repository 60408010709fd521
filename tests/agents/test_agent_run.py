"""A whole run of an agent task: real engine, trainer, gateway and processes; then its model evaluated and served."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from rollart.app import preflight
from rollart.core.event_log import read_events
from rollart.core.events import AgentPlayed, StepDone
from rollart.fleet import controller, evaluation
from rollart.observe.metrics import measure
from rollart.rollout.ledger import SqliteLedger
from rollart.rollout.samples import samples

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.yaml"
SMALL = [
    "training.steps=6",
    "training.batch_groups=4",
    "training.group_size=4",
    "environments.processes=8",
    "evaluation.every=0",
    "evaluation.final_episodes=4",
]


LONG = "tasks.digits.agent={function: rollart.agents.demo:digits, deadline: 900}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(controller.train(preflight.load_run(EXAMPLE, SMALL), folder))
    return folder


@pytest.mark.slow
def test_an_agent_task_trains_and_reports_what_its_agents_did(trained: Path) -> None:
    shot = measure(read_events(trained / "events"))
    assert shot.step == 6 and shot.trained == 6 * 4 * 4
    assert not shot.drops
    reported = shot.task("digits").agent
    assert reported["completions"] == 2 * reported["segments"] == reported["requests"]
    assert (reported["forks"], reported["undelivered"]) == (0, 0)
    assert any(isinstance(event, AgentPlayed) and event.held_out for event in read_events(trained / "events"))
    ledger = SqliteLedger.open_readonly(trained / "ledger.sqlite")
    (trajectory,) = ledger.scored(1)
    (sample,) = samples(trajectory)
    assert sample.actions == trajectory.action_tokens > 0


@pytest.mark.slow
def test_an_agent_task_is_evaluated_with_a_saved_model(trained: Path, tmp_path: Path) -> None:
    run = preflight.load_run(EXAMPLE, SMALL, need_model=False)
    result = asyncio.run(evaluation.evaluate(run, trained / "model", directory=tmp_path / "eval"))
    assert result["tasks"]["digits"]["episodes"] == 4
    assert result["tasks"]["digits"]["failed"] == 0


@pytest.mark.slow
def test_a_trained_model_is_served_until_ctrl_c(trained: Path) -> None:
    environment: dict[str, Any] = {**os.environ, "ROLLART_API_KEY": "my-own-key", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rollart.app.cli", "serve", "--model", str(trained / "model"), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        reported = {}
        for line in server.stdout:
            name, _, value = line.strip().partition(" ")
            reported[name] = value.strip()
            if "Ctrl-C" in line:
                break
        assert "my-own-key" not in json.dumps(reported)
        client = openai.OpenAI(base_url=reported["OpenAI"], api_key="my-own-key", max_retries=0, timeout=60)
        said: list[Any] = [{"role": "user", "content": "digits 0"}]
        answers = [
            client.chat.completions.create(model="model", messages=said, max_tokens=6, temperature=0) for _ in range(2)
        ]
        assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
        streamed = client.chat.completions.create(
            model="model", messages=said, max_tokens=6, temperature=0, stream=True
        )
        pieces = [text for chunk in streamed if (text := chunk.choices[0].delta.content)]
        assert "".join(pieces) == answers[0].choices[0].message.content
        assert answers[0].usage is not None
        assert len(pieces) > 1 or answers[0].usage.completion_tokens <= 2  # a digit, and the end of the turn
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="another", messages=said)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="guess").models.list()
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130
    finally:
        server.kill()
        server.wait(10)


@pytest.mark.slow
def test_streams_that_are_read_left_or_ended_by_a_stop_string_train_only_what_was_delivered(tmp_path: Path) -> None:
    more = ["training.steps=2", "tasks.digits.agent=sample_agents:streams", "tasks.digits.sampling.max_tokens=40"]
    asyncio.run(controller.train(preflight.load_run(EXAMPLE, [*SMALL, *more]), tmp_path))
    shot = measure(read_events(tmp_path / "events"))
    assert shot.step == 2 and not shot.drops
    played = SqliteLedger.open_readonly(tmp_path / "ledger.sqlite").scored(8)
    for trajectory in played:
        *left, read, ended = trajectory.turns
        assert len(left) <= 1  # the stream that was left counts if its last token was sent before that was seen
        assert trajectory.info["pieces"] > 1
        assert read.segment == ended.segment and len(ended.logprobs) == len(ended.tokens)
        stopped = any(vowel in ended.action for vowel in "aeiou")
        assert trajectory.reward == float(stopped or ended.finish == "stop")
        assert not any(vowel in ended.action[:-1] for vowel in "aeiou")


@pytest.mark.slow
def test_conversations_that_fork_are_trained_segment_by_segment(tmp_path: Path) -> None:
    run = preflight.load_run(EXAMPLE, [*SMALL, "training.steps=2", "tasks.digits.agent=sample_agents:sub_agents"])
    asyncio.run(controller.train(run, tmp_path))
    log = list(read_events(tmp_path / "events"))
    reported = measure(log).task("digits").agent
    assert reported["segments"] == 3 * reported["completions"] // 4
    steps = [event for event in log if isinstance(event, StepDone)]
    assert [step.values["skipped"] for step in steps] == [0.0, 0.0]
    assert all(step.values["action_tokens"] > 0 for step in steps)


@pytest.mark.parametrize(("given", "seconds"), [([], 300.0), ([LONG], 900.0)])
def test_the_deadline_of_an_agent_may_be_above_that_of_trajectories(given: list[str], seconds: float) -> None:
    (task,) = controller.rollout_tasks(preflight.load_run(EXAMPLE, given))
    assert task.deadline == seconds
