"""`rollart reward`: the real service, its package in a virtual environment of its own, and the comparison."""

import json
import subprocess
import sys
import venv
from contextlib import closing
from pathlib import Path

import pytest
from served import free_port, server

from rollart.core.types import Message, Outcome, Trajectory, Turn
from rollart.rewards.closure import closure
from rollart.rewards.comparison import recorded_episodes
from rollart.rollout.ledger import SqliteLedger

ROLLART = [sys.executable, "-m", "rollart.app.cli"]
REWARDS = """\
from helpers.words import count
from rollart.core.types import Episode, RewardResult


def brief(episode: Episode) -> RewardResult:
    words = count(episode.turns[-1].action)
    return RewardResult(1.0 - words / 10, parts={"words": words}, success=words < 3)


brief.version = "3"
"""


@pytest.fixture
def user(tmp_path):
    """A folder with the user's own modules."""
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "words.py").write_text("def count(text):\n    return len(text.split())\n")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path


@pytest.fixture
def run_dir(tmp_path):
    """Three scored episodes, one whose reward failed, and one that never came to be scored."""
    folder = tmp_path / "run"
    folder.mkdir()
    outcomes = ["finished", "truncated", "finished", "reward_failed", "env_failed"]
    with closing(SqliteLedger.open(folder / "ledger.sqlite")) as ledger:
        for number, outcome in enumerate(outcomes):
            turn = Turn((Message("user", "?"),), (1,), "word " * number, (2,), (-0.1,), (0,), "stop", 0.5)
            task = "b" if number == 2 else "a"
            ledger.add(Trajectory(f"{task}-{number}", task, "g", 0, 7, Outcome(outcome), (turn,), info={"n": number}))
    return folder


def rollart(*args, cwd):
    command = [*ROLLART, "reward", *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def serving(user, port, **environment):
    argv = [*ROLLART, "reward", "serve", "my_rewards:brief", "--port", str(port)]
    return server(argv, port, user, **environment)


def test_recorded_episodes_are_those_whose_reward_was_called(run_dir):
    episodes = recorded_episodes(run_dir, 10)
    assert {episode.id for episode in episodes} == {"a-0", "a-1", "b-2", "a-3"}
    assert {episode.id: episode.truncated for episode in episodes}["a-1"]
    assert [episode.info for episode in recorded_episodes(run_dir, 10, ["b"])] == [{"n": 2}]
    assert len(recorded_episodes(run_dir, 2)) == 2


@pytest.mark.slow
def test_reward_test_compares_a_served_reward_with_the_local_one(user, run_dir, monkeypatch):
    port = free_port()
    with serving(user, port, ROLLART_REWARD_SECRET="sesame") as url:
        monkeypatch.setenv("MINE", "sesame")
        test = ("test", "my_rewards:brief", "--url", url, "--run", run_dir, "--json")
        same = rollart(*test, "--secret", "MINE", cwd=user)
        unsigned = rollart(*test, cwd=user)
        (user / "helpers" / "words.py").write_text("def count(text):\n    return min(2, len(text.split()))\n")
        changed = rollart(*test, "--secret", "MINE", cwd=user)
    assert same.returncode == 0, same.stderr
    assert json.loads(same.stdout) == {"episodes": 4, "different": []}
    assert "4 episodes, 0 differ" in same.stderr
    assert unsigned.returncode == changed.returncode == 1
    assert "HTTP 401" in unsigned.stderr
    assert len(json.loads(unsigned.stdout)["different"]) == 4
    assert json.loads(changed.stdout)["different"] == ["a-3"]
    assert "a-3: local RewardResult(value=0.8" in changed.stderr
    assert "served RewardResult(value=0.7" in changed.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("serve", "my_rewards:brief", "--host", "0.0.0.0"), "on 0.0.0.0 it would accept unsigned requests"),
        (("serve", "my_rewards:nothing"), "cannot be imported"),
        (("package", "my_rewards:nothing", "-o", "out"), "which module 'my_rewards' does not have"),
        (("package", "my_rewards:brief", "-o", "."), ". is not empty"),
        (
            ("test", "my_rewards:brief", "--url", "http://x", "--run", "nowhere"),
            "does not exist; is this a run folder?",
        ),
        (("test", "my_rewards:brief", "--url", "x", "--run", "run"), "must begin with http://"),
        (("test", "my_rewards:brief", "--url", "http://x", "--run", "run", "--args", "[]"), "must be a JSON object"),
        (("test", "my_rewards:brief", "--url", "http://x", "--run", "run", "--task", "c"), "of task c"),
    ],
)
def test_a_command_that_cannot_run_prints_one_sentence(user, run_dir, args, sentence):
    done = rollart(*args, cwd=user)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_has_the_needed_files_and_no_more(user):
    done = rollart("package", "my_rewards:brief", "-o", "out", cwd=user)
    assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(user / "out")) for path in (user / "out").rglob("*") if path.is_file()}
    assert files == {
        *("Dockerfile", "README.md", "main.py", "handler.py", "requirements.txt", "requirements-handler.txt"),
        *("my_rewards.py", "helpers/words.py"),
        *("rollart/__init__.py", "rollart/core/__init__.py", "rollart/core/types.py", "rollart/core/run_length.py"),
        "rollart/core/teaching.py",
        *("rollart/core/expert_choice.py", "rollart/core/foreign.py", "rollart/core/column.py"),
        *("rollart/rewards/__init__.py", "rollart/rewards/runtime.py", "rollart/rewards/wire.py"),
    }
    assert [line.partition("==")[0] for line in (user / "out/requirements.txt").read_text().splitlines()] == [
        *("functions-framework", "msgspec"),
    ]
    assert (user / "out" / "my_rewards.py").read_text() == REWARDS


@pytest.mark.parametrize("module", ["functions", "judge", "execution"])
def test_the_rewards_that_ship_need_nothing_but_msgspec(module):
    assert closure(f"rollart.rewards.{module}", "rollart.rewards.runtime").packages == {"msgspec"}


HANDLE = """\
import json, sys
import handler
event = {"episode": {"id": "e", "task": "t", "seed": 1, "turns": [{"messages": [], "action": "two words"}]}}
print(json.dumps([handler.handler(event, None)["value"], handler.handler(json.dumps(event).encode(), None)["value"]]))
assert not {"torch", "pydantic", "numpy"} & set(sys.modules)
"""


@pytest.mark.slow
def test_a_package_runs_in_a_clean_environment_with_only_its_requirements(user, run_dir):
    assert rollart("package", "my_rewards:brief", "-o", "out", cwd=user).returncode == 0
    out, clean = user / "out", user / "clean"
    venv.create(clean, with_pip=True)
    python = str(clean / "bin" / "python")
    install = [python, "-m", "pip", "install", "-q", "-r", "requirements.txt"]
    done = subprocess.run(install, cwd=out, capture_output=True, text=True, timeout=240)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, done.stderr
    handled = subprocess.run([python, "-c", HANDLE], cwd=out, capture_output=True, text=True, timeout=60)
    assert handled.returncode == 0, handled.stderr
    assert json.loads(handled.stdout) == [0.8, 0.8]
    port = free_port()
    framework = str(Path(python).with_name("functions-framework"))
    with server([framework, "--target=score", "--host=127.0.0.1", f"--port={port}"], port, out) as url:
        test = rollart("test", "my_rewards:brief", "--url", url, "--run", run_dir, cwd=user)
    assert test.returncode == 0, test.stdout
