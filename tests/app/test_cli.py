import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_run import write_log
from typer.testing import CliRunner, Result

import rollart
from rollart.app.cli import app
from rollart.core import events as ev
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog, read_events
from rollart.core.types import Message, Outcome, Trajectory, Turn
from rollart.fleet import controller
from rollart.observe import summary
from rollart.observe.metrics import measure
from rollart.rollout.ledger import SqliteLedger

RUN = """\
name: quick
model:
  tiny: {}
tasks:
  - name: lake
    env: rollart.envs.frozen_lake:FrozenLake
    reward: json:dumps
training:
  steps: 2
"""


def rollart_command(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("quick.yaml")
    path.write_text(RUN)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "quick-1"
    folder.mkdir()
    log: list[ev.AnyEvent] = [
        ev.RunStarted(t=0, name="quick", preset="rollart", alpha=1, seed=0, steps=2, tasks=["lake"]),
        ev.Evaluated(t=1, version=0, task="lake", episodes=8, success=0.25, reward=0.25, failed=0, final=True),
        ev.TrajectoryStarted(t=2, trajectory="lake-000001.0", task="lake", group="lake-000001", version=0),
        ev.TrajectoryEnded(
            t=3,
            trajectory="lake-000001.0",
            task="lake",
            group="lake-000001",
            outcome=Outcome.FINISHED,
            turns=1,
            tokens=2,
            seconds=1,
            reward=1.0,
            success=True,
        ),
        ev.Evaluated(t=4, version=2, task="lake", episodes=8, success=0.75, reward=0.75, failed=0, final=True),
        ev.RunEnded(t=5, version=2, reason="finished"),
    ]
    write_log(folder / "events", log)
    turn = Turn((Message("user", "P _ G"),), (1, 2, 3), "Right", (4, 5), (-0.1, -0.2), (0, 0), "stop", 1.0, 0.2, 0.1)
    ledger = SqliteLedger.open(folder / "ledger.sqlite")
    ledger.add(Trajectory("lake-000001.0", "lake", "lake-000001", 0, 7, Outcome.FINISHED, (turn,), 1.0, success=True))
    ledger.close()
    return folder


def test_help_groups_the_commands_and_teaches_by_example() -> None:
    text = rollart_command("--help").output
    for words in ("Train", "Look at a run", "Prepare", "trajectory", "rollart init quickstart"):
        assert words in text
    for command in ("train", "sft", "eval", "sample", "dpo", "check", "schema", "show", "trajectory", "timeline"):
        assert f"rollart {command}" in rollart_command(command, "--help").output


def test_the_version_is_the_package_version() -> None:
    assert rollart_command("--version").output == f"rollart {rollart.__version__}\n"


@pytest.mark.parametrize("command", ["--help", "check quick.yaml", "show quick-1"])
def test_light_commands_import_nothing_heavy(run_file: Path, run_dir: Path, command: str) -> None:
    code = (
        "import sys, contextlib\nfrom rollart.app.cli import app\n"
        "with contextlib.suppress(SystemExit): app()\n"
        "sys.exit(3 if {'torch', 'transformers', 'matplotlib', 'tensorboard', 'numpy'} & set(sys.modules) else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code, *command.split()], timeout=60, capture_output=True, check=False)
    assert ended.returncode == 0, ended


def test_an_error_is_one_sentence_on_stderr_and_exit_2(run_file: Path) -> None:
    run_file.write_text(RUN.replace("steps: 2", "group_sise: 2"))
    ended = rollart_command("check", run_file)
    assert ended.exit_code == 2
    assert ended.stdout == ""
    assert ended.stderr == "quick.yaml:9: unknown key 'group_sise' in training; did you mean 'group_size'?\n"


def test_check_shows_the_whole_file_and_where_everything_goes(run_file: Path) -> None:
    text = rollart_command("check", run_file, "--set", "training.steps=7").stdout
    for words in ("steps: 7", "group_size: 8", "controller", "up to 64", "16 groups of lake", "at most 256"):
        assert words.lower() in text.lower()


def test_check_as_json_is_one_object(run_file: Path) -> None:
    reported = json.loads(rollart_command("check", run_file, "--json").stdout.splitlines()[-1])
    assert reported["run"]["training"]["group_size"] == 8
    assert {binding["role"] for binding in reported["plan"]["bindings"]} == {"train", "generate", "environment"}
    assert not Path("runs").exists()


def test_check_plans_for_nodes_that_are_described_in_a_file(run_file: Path) -> None:
    Path("nodes.yaml").write_text("- {name: big, devices: {H800: 2, cpu: 8}}\n- {name: small, devices: {H20: 2}}\n")
    pools = ["--set", "pools={compute: {role: generate, device: [H800, H20], count: 3}, a: {role: generate}}"]
    text = " ".join(rollart_command("check", run_file, *pools, "--nodes", "nodes.yaml").stdout.split())
    for words in ("goes: nodes.yaml", "compute 2 H800 big as named", "compute 1 H20 small fallback", "a 1 H20 small"):
        assert words in text


def test_check_refuses_pools_that_find_no_place(run_file: Path) -> None:
    run_file.write_text(RUN + "pools: {compute: {role: generate, device: H800, count: 2}}\n")
    command = [str(Path(sys.executable).with_name("rollart")), "check", str(run_file)]
    ended = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "pool 'compute' wants 2 engines on H800, but there is room for none of them" in ended.stderr
    assert "What to do: try it without such devices" in ended.stderr


def test_check_labels_what_is_emulated_and_what_is_external(run_file: Path) -> None:
    pools = (
        "pools={a: {role: generate, device: H800, emulate: 500}, b: {role: generate, device: H20, urls: ['http://x']}}"
    )
    text = rollart_command("check", run_file, "--set", pools).stdout
    assert "emulated H800 (1/500)" in text
    assert "external H20" in text
    assert "http://x" in text


def test_the_examples_that_need_nothing_pass_the_check() -> None:
    for example in ("quickstart", "mixed"):
        ended = rollart_command("check", Path(__file__).parents[2] / "examples" / f"{example}.yaml")
        assert ended.exit_code == 0, ended.output


def test_the_schema_is_json() -> None:
    assert json.loads(rollart_command("schema").stdout)["properties"]["training"]


def test_show_prints_the_results(run_dir: Path) -> None:
    text = rollart_command("show", run_dir).stdout
    assert "0.250" in text
    assert "0.750" in text
    assert json.loads(rollart_command("show", run_dir, "--json").stdout)["tasks"]["lake"]["failure_ratio"] == 0.333333


def test_a_trajectory_is_found_by_the_beginning_of_its_id(run_dir: Path) -> None:
    listed = rollart_command("trajectory", run_dir).stdout
    assert "lake-000001.0" in listed and f"to read one: rollart trajectory {run_dir} lake-" in listed
    text = rollart_command("trajectory", run_dir, "lake-0").stdout
    for words in ("P _ G", "Right", "reward 1", "version 0", "started 0:02 into the run"):
        assert words in text
    missing = rollart_command("trajectory", run_dir, "nope")
    assert "`rollart trajectory RUN_DIR` lists some" in missing.stderr
    assert (missing.exit_code, len(missing.stderr.splitlines())) == (2, 1)


def test_the_timeline_is_written_where_asked_and_never_into_the_run(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollart_command("timeline", run_dir, "-o", tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    before = set(run_dir.iterdir())
    monkeypatch.chdir(tmp_path)
    rollart_command("timeline", run_dir)
    assert (tmp_path / "quick-1-timeline.json").exists()
    assert set(run_dir.iterdir()) == before


@pytest.mark.parametrize("command", ["show", "timeline", "trajectory"])
def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path, command: str) -> None:
    ended = rollart_command(command, tmp_path)
    assert ended.exit_code == 2
    assert "is not a run folder" in ended.stderr


def test_eval_wants_a_model_folder(run_file: Path) -> None:
    ended = rollart_command("eval", run_file, "--model", "nowhere")
    assert ended.exit_code == 2
    assert "is not a Hugging Face model folder" in ended.stderr


def controlled(monkeypatch: pytest.MonkeyPatch, end: BaseException | None = None) -> list[tuple[Path, bool]]:
    """Stands where the controller is: the command's own work is to choose the folder, watch, print and exit."""
    calls: list[tuple[Path, bool]] = []

    async def train(
        run: Any,
        directory: Path,
        *,
        resume: bool,
        on_log: Callable[[EventLog], None],
        stage: str,
        metrics: Any = None,
    ) -> dict[str, Any]:
        calls.append((directory, resume))
        ticks = iter(range(100))
        log = EventLog(directory / "events", lambda: float(next(ticks)))
        on_log(log)
        print(f"a stray print {'with' if stage == 'train' else 'without'} RL")
        log.emit(ev.RunStarted(name=run.name, preset="rollart", alpha=1, seed=0, steps=2, tasks=["lake"]))
        for version, success in ((0, 0.25), (2, 0.75)):
            log.emit(
                ev.Evaluated(version=version, task="lake", episodes=8, success=success, reward=0, failed=0, final=True)
            )
        if end:
            raise end
        log.emit(ev.RunEnded(version=2, reason="finished"))
        log.close()
        return summary.write(directory, measure(read_events(directory / "events")))

    monkeypatch.setattr(controller, "train", train)
    return calls


def test_train_leaves_the_views_and_prints_json_last(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controlled(monkeypatch)
    ended = rollart_command("train", run_file, "--json")
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["tasks"]["lake"]["after"] == 0.75
    assert "a stray print" in ended.stderr
    assert "version 2: lake 0.750" in ended.stderr
    folder = Path("runs/quick-1")
    for name in ("summary.json", "snapshot.json", "curves.png", "events", "tensorboard"):
        assert (folder / name).exists()


def test_sft_is_the_run_without_rl_and_ends_with_its_model(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controlled(monkeypatch)
    assert "a stray print with RL" in rollart_command("train", run_file).output
    line = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    Path("chats.jsonl").write_text(line + "\n")
    ended = rollart_command("sft", run_file, "--set", "model.warmup={conversations: chats.jsonl, steps: 1}")
    assert "a stray print without RL" in ended.output
    assert "model: runs/quick-2/model" in ended.output


def test_each_run_gets_its_own_folder_and_resume_takes_the_newest(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = controlled(monkeypatch)
    for arguments in ([], [], ["--resume"], ["--resume", "--run-dir", "runs/quick-1"], ["--output", "other"]):
        assert rollart_command("train", run_file, *arguments).exit_code == 0
    folders = [(str(folder), resume) for folder, resume in calls]
    assert folders == [
        ("runs/quick-1", False),
        ("runs/quick-2", False),
        ("runs/quick-2", True),
        ("runs/quick-1", True),
        ("other/quick-1", False),
    ]


def test_nothing_to_resume_and_a_folder_in_use_are_errors(
    run_file: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = controlled(monkeypatch)
    assert "holds no run of 'quick' to resume" in rollart_command("train", run_file, "--resume").stderr
    assert "is not empty" in rollart_command("train", run_file, "--run-dir", run_dir).stderr
    assert not calls


@pytest.mark.parametrize(("end", "code"), [(RollartError("the engine died"), 2), (KeyboardInterrupt(), 130)])
def test_a_run_that_breaks_off_has_no_traceback(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException, code: int
) -> None:
    controlled(monkeypatch, end)
    ended = rollart_command("train", run_file)
    assert ended.exit_code == code
    assert "Traceback" not in ended.output
    wanted = "the engine died" if code == 2 else "rollart train quick.yaml --resume --run-dir runs/quick-1"
    assert wanted in ended.output


def test_modules_in_the_current_folder_can_be_named(run_file: Path) -> None:
    Path("own_env_in_cwd.py").write_text("class Env:\n    def reset(self, seed):\n        return 'go'\n")
    run_file.write_text(RUN.replace("rollart.envs.frozen_lake:FrozenLake", "own_env_in_cwd:Env"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(Path(sys.executable).with_name("rollart")), "check", str(run_file), "--json"]
    assert subprocess.run(command, env=environment, timeout=60, capture_output=True, check=False).returncode == 0
