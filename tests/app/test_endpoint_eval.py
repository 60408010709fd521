"""`rollart eval --endpoint`: any OpenAI-compatible model plays the held-out episodes; tasks of weight 0; pass@k."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

import rollart
from rollart.app.run_reader import RunFolder
from rollart.config.loading import load
from rollart.core.errors import ConfigError, RollartError
from rollart.observe.report import report
from rollart.rollout.ledger import SqliteLedger

RUN = """
name: sums
model: {tiny: {}}
tasks:
  - {name: sums, env: "rollart.envs.addition:Addition", max_context: 64, sampling: {max_tokens: 8}}
evaluation: {final_episodes: 6, samples: 2}
"""


@contextmanager
def served(reply: str, status: int = 200) -> Iterator[tuple[str, list[dict[str, object]]]]:
    """An endpoint that always gives this reply; and the requests it got."""
    requests: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps({"choices": [{"message": {"content": reply}, "finish_reason": "stop"}]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
        server.shutdown()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.mark.slow
def test_an_endpoint_plays_every_episode_as_often_as_asked(run_file: Path, tmp_path: Path) -> None:
    with served('"12"\nnot the sum\x1e') as (url, requests):
        found = rollart.evaluate(run_file, "big-model", endpoint=url, folder=tmp_path / "eval")
    score = found.tasks["sums"]
    assert (score.episodes, score.failed, score.samples) == (12, 0, 2)
    assert len(requests) == 12 and requests[0]["model"] == "big-model" and requests[0]["max_tokens"] == 8
    played = list(SqliteLedger.open_readonly(tmp_path / "eval" / "ledger.sqlite").trajectories(held_out=True))
    assert {trajectory.turns[0].action for trajectory in played} == {'"12"\nnot the sum\x1e'}
    assert len({trajectory.seed for trajectory in played}) == 6


@pytest.mark.slow
def test_an_endpoint_answers_each_held_out_row_once_and_the_report_names_it(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{number}?", "answer": "12"}) for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    dataset = f"dataset: {{path: {tmp_path / 'rows.jsonl'}, prompt: '{{question}}'}}, reward: exact"
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace('env: "rollart.envs.addition:Addition"', dataset).replace("6, samples: 2", "100"))
    with served("12") as (url, requests):
        found = rollart.evaluate(path, "big-model", endpoint=url, folder=tmp_path / "eval")
    asked = [str(request["messages"]) for request in requests]
    assert 0 < len(asked) == len(set(asked)) == found.tasks["sums"].episodes < 20
    console = Console(width=100, record=True, file=StringIO())
    console.print(report(RunFolder(tmp_path / "eval").snapshot()))
    page = console.export_text()
    assert f"sums (eval of big-model at {url}, seed 0): finished" in page
    assert "before" not in page and "trained" not in page


@pytest.mark.slow
def test_an_endpoint_that_fails_is_no_failure_of_the_policy(run_file: Path, tmp_path: Path) -> None:
    with served("", status=500) as (url, _), pytest.raises(RollartError, match=r"engine_failed.*HTTP 500"):
        rollart.evaluate(run_file, "big-model", endpoint=url, folder=tmp_path / "eval")


def test_a_run_whose_tasks_all_have_weight_0_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="every task has weight 0"):
        load(run_file, ["tasks.sums.weight=0"])


@pytest.mark.slow
def test_a_task_of_weight_0_is_evaluated_and_not_trained(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        RUN.replace("{tiny: {}}", "{tiny: {hidden: 32, layers: 1, context: 128}}").replace(
            "evaluation:",
            '  - {name: other, env: "rollart.envs.addition:Addition", weight: 0, max_context: 64, '
            "sampling: {max_tokens: 4}}\ntraining: {steps: 2, batch_groups: 2, group_size: 2}\nevaluation:",
        )
    )
    rollart.train(path, folder=tmp_path / "run")
    ledger = SqliteLedger.open_readonly(tmp_path / "run" / "ledger.sqlite")
    assert {trajectory.task for trajectory in ledger.trajectories(held_out=False)} == {"sums"}
    assert {trajectory.task for trajectory in ledger.trajectories(held_out=True)} == {"sums", "other"}
