"""`rollart play` as a user meets it: as a command, with a real environment process behind it."""

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollart.config import TinyModelConfig
from rollart.models import tiny

pytestmark = pytest.mark.slow

RUN = """\
model: {tiny: {context: 256}}
tasks:
  - name: guess
    env: rollart.envs.guess_number:GuessNumber
    args: {top: 23, min_width: 5, max_width: 8, guesses: 3}
    player: rollart.envs.guess_number:player
    player_args: {skill: 1.0}
    max_turns: MAX_TURNS
    max_context: 200
    sampling: {max_tokens: 6}
"""
COMMAND = [str(Path(sys.executable).with_name("rollart")), "play"]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("MAX_TURNS", "3"))
    return path


def play(*arguments: object, typed: str | None = "") -> tuple[int, str, str]:
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb"}
    ended = subprocess.run(
        [*COMMAND, *map(str, arguments)], input=typed, capture_output=True, text=True, timeout=120, env=environment
    )
    return ended.returncode, ended.stdout, ended.stderr


def test_the_scripted_player_plays_to_the_end(run_file: Path) -> None:
    code, text, _ = play(run_file, "guess", "--player", "scripted", "--seed", 1)
    assert code == 0
    assert text.startswith("user\n") and "assistant\n" in text
    assert text.rstrip().splitlines()[-1].startswith("finished after ")
    assert text.rstrip().endswith("; reward 1, success")
    assert play(run_file, "guess", "--player", "scripted", "--seed", 1)[1] == text
    assert play(run_file, "guess", "--player", "scripted", "--seed", 1, "--held-out")[1] != text


def test_a_person_plays_line_by_line(run_file: Path) -> None:
    code, text, _ = play(run_file, "guess", typed="0\n0\n0\n")
    assert code == 0
    assert text.count("assistant> ") == 3 and "higher" in text
    assert "finished after 3 turns; reward" in text and text.rstrip().endswith("no success")


def test_a_person_may_leave_by_the_end_of_the_input(run_file: Path) -> None:
    code, text, errors = play(run_file, "guess", typed="0\n")
    assert (code, errors) == (0, "")
    assert text.rstrip().endswith("you left after 1 turn")


def test_the_input_may_be_a_file(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "moves").write_text("0\n0\n0\n")
    with open(tmp_path / "moves") as moves:
        ended = subprocess.run([*COMMAND, run_file, "guess"], stdin=moves, capture_output=True, text=True, timeout=120)
    assert "finished after 3 turns" in ended.stdout


def test_ctrl_c_ends_at_once_and_leaves_no_process(run_file: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, run_file, "guess"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.close(theirs)
    assert process.stdout is not None
    seen = b""
    while b"assistant>" not in seen:
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece, "it ended before it asked"
        seen += piece
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    os.close(ours)
    assert process.returncode == 130 and b"Traceback" not in errors
    assert not [child for child in children if Path(f"/proc/{child}").exists()]


def test_tokens_are_shown_as_the_model_of_the_run_would_see_them(run_file: Path) -> None:
    _, text, _ = play(run_file, "guess", "--player", "scripted", "--tokens")
    assert "4:'<|user|>'" in text and "5:'<|assistant|>'" in text and "2:'<|im_end|>'" in text
    parts = [int(size) for size in re.findall(r"(\d+) tokens: ", text)]
    assert f"; {sum(parts)} tokens in all; reward" in text


@pytest.mark.slow
def test_a_saved_model_plays_with_the_tokens_it_sampled(run_file: Path, tmp_path: Path) -> None:
    model = tiny.make(
        TinyModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, context=256), tmp_path / "model", seed=0
    )
    code, text, errors = play(run_file, "guess", "--player", model, "--tokens")
    assert (code, errors) == (0, "")
    assert "finished after 3 turns" in text and " tokens: " in text


def test_the_limits_of_the_task_end_it_with_their_name(run_file: Path) -> None:
    run_file.write_text(RUN.replace("MAX_TURNS", "2"))
    assert "truncated after 2 turns: max_turns; reward" in play(run_file, "guess", typed="0\n0\n")[1]
    _, text, _ = play(run_file, "guess", "--tokens", "--set", "tasks.guess.max_context=20", typed="0\n0\n")
    assert "truncated: max_context (20 tokens) has no room left for an action of" in text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gess"], "the run file has no task 'gess'; did you mean 'guess'?"),
        (["guess", "--player", "/no/such"], "/no/such has no config.json"),
        (["guess", "--player", "scripted", "--set", "tasks.guess.player=null"], "has no `player`"),
        (["guess", "--set", "tasks.guess.args.top=-1"], "GuessNumber needs 1 <= min_width"),
    ],
)
def test_what_cannot_be_played_is_reported_in_a_sentence(run_file: Path, arguments: list[str], sentence: str) -> None:
    code, _, errors = play(run_file, *arguments)
    assert code == 2 and sentence in errors and "Traceback" not in errors


AGENT = """\
from rollart.core.llm_client import ask


def solve(endpoint, episode):
    said = [{"role": "user", "content": "a number"}]
    for question in ("a larger one", ""):
        answer = ask(endpoint.base_url, endpoint.model, said, whole=False)
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return {"reward": float(said[3]["content"] > said[1]["content"]), "success": True}
"""


@pytest.fixture
def agent_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "larger.py").write_text(AGENT)
    path = tmp_path / "agent.yaml"
    task = '{name: larger, agent: "larger:solve", max_context: 100, sampling: {max_tokens: 4}}'
    path.write_text(f"model: {{tiny: {{context: 256}}}}\ntasks: [{task}]\n")
    monkeypatch.chdir(tmp_path)
    return path


def test_a_person_answers_the_requests_of_an_agent(agent_file: Path) -> None:
    code, text, errors = play(agent_file, "larger", typed="3\n7\n")
    assert (code, errors) == (0, "")
    assert (
        text.index("a number") < text.index("a larger one") < text.index("finished after 2 answers; reward 1, success")
    )
    code, text, errors = play(agent_file, "larger", typed="3\n")
    assert (code, errors) == (0, "") and text.rstrip().endswith("you left")


def test_a_saved_model_answers_an_agent_and_a_script_cannot(agent_file: Path, tmp_path: Path) -> None:
    model = tiny.make(TinyModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, context=256), tmp_path / "model", 0)
    code, text, errors = play(agent_file, "larger", "--player", model, "--tokens")
    assert (code, errors) == (0, "") and "finished after 2 answers" in text and " tokens: " in text
    code, _, errors = play(agent_file, "larger", "--player", "scripted")
    assert code == 2 and "is an agent: answer it yourself" in errors
