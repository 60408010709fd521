"""What would fail a minute after the start is refused by `rollart check`, and files that cannot be written are one
sentence."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from rollart.app import api, preflight
from rollart.app.cli import app
from rollart.app.commands import common
from rollart.core.errors import ConfigError, RollartError

TASK = {"name": "t", "env": "rollart.envs.guess_number:GuessNumber"}


def write(folder: Path, task: dict[str, Any] | None = None, **more: Any) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "r", "model": {"tiny": {}}, "tasks": [{**TASK, **(task or {})}], **more}))
    return path


@pytest.mark.parametrize(
    ("task", "more", "reason"),
    [
        ({"max_context": 64, "sampling": {"max_tokens": 64}}, {}, "has no room for an observation"),
        ({}, {"model": {"tiny": {"hidden": 50}}}, "hidden (50) must be an even multiple of heads (4)"),
        ({}, {"model": {"tiny": {"hidden": 36}}}, "hidden (36) must be an even multiple of heads (4)"),
    ],
)
def test_values_that_cannot_work_together_are_refused(
    tmp_path: Path, task: dict[str, Any], more: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        preflight.load_run(write(tmp_path, task, **more))
    assert reason in str(error.value)


def test_a_model_that_sees_or_hears_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {"depth": 2}}')
    with pytest.raises(ConfigError, match=r"multimodal model \(its config.json has `vision_config`\); .* text only"):
        preflight.load_run(write(tmp_path, model={"path": str(tmp_path)}))


@pytest.mark.parametrize("role", ["teacher", "judge"])
def test_a_pool_whose_model_is_not_there_is_refused_unless_an_api_serves_it(tmp_path: Path, role: str) -> None:
    pool = {"role": role, "model": "runs/none"}
    with pytest.raises(ConfigError, match=rf"pools.wise.model 'runs/none' is not a Hugging Face .* a {role} behind an"):
        preflight.load_run(write(tmp_path, pools={"wise": pool}))
    preflight.load_run(write(tmp_path, pools={"wise": {**pool, "urls": ["http://localhost:1/v1"]}}))


def test_other_systems_get_a_sentence_about_what_works_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.app.cli.sys.platform", "darwin")
    shown = CliRunner().invoke(app, ["check", "no-such-file.yaml"])
    assert "made for Linux, and this is darwin" in shown.output and "WSL 2" in shown.output


@pytest.mark.parametrize(
    "task", [{"env": "rollart.envs.terminal:Terminal"}, {"reward": "rollart.rewards.execution:program_output"}]
)
def test_a_missing_bubblewrap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, Any]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs bubblewrap; install it"):
        preflight.load_run(write(tmp_path, task))


@pytest.mark.parametrize(
    ("task", "variables", "reason"),
    [
        ({}, {"E2B_API_KEY": "k"}, r"names the image e2b://base, which needs a key; give the task `pass_env:"),
        ({"pass_env": ["E2B_API_KEY"]}, {}, "E2B_API_KEY is not set here"),
        ({"args": {"image": "modal://x"}}, {}, "of no known service; known are e2b://, daytona://"),
    ],
)
def test_a_missing_key_of_a_sandbox_service_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, Any], variables: dict[str, str], reason: str
) -> None:
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=reason):
        task = {"env": "rollart.envs.terminal:Terminal", "args": {"image": "e2b://base"}, **task}
        preflight.load_run(write(tmp_path, task))


def test_an_image_without_an_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollart.app.images.container_engine", lambda: None)
    with pytest.raises(ConfigError, match=r"needs the image debian:12, which needs podman or docker"):
        preflight.load_run(write(tmp_path, {"env": "rollart.envs.terminal:Terminal", "args": {"image": "debian:12"}}))


def test_a_command_agent_in_a_sandbox_of_a_service_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot reach the gateway"):
        preflight.load_run(write(tmp_path, {"env": None, "agent": {"command": ["x"], "image": "e2b://base"}}))


def test_a_run_for_other_machines_needs_no_vllm_here(tmp_path: Path) -> None:
    pools = {"engines": {"role": "generate", "engine": "vllm", "device": "H800"}}
    path = write(tmp_path, pools=pools, vllm={"python": str(tmp_path / "nowhere")})
    with pytest.raises(ConfigError, match="no Python at"):
        preflight.load_run(path)
    assert preflight.load_run(path, here=False).pools["engines"].engine == "vllm"


def test_an_output_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["train", str(write(tmp_path)), "--output", str(tmp_path / "file")])
    assert done.exit_code == 2
    assert "--output and --run-dir must be folders" in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("number", "hint"), [(errno.ENOSPC, "make room"), (errno.EACCES, "may write to"), (errno.EROFS, "may write to")]
)
def test_a_folder_that_cannot_be_written_is_one_sentence(
    capsys: pytest.CaptureFixture[str], number: int, hint: str
) -> None:
    @common.guarded
    def command() -> None:
        raise OSError(number, "it failed", "/some/folder")

    with pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("/some/folder: it failed; ") and hint in printed


def test_a_write_to_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    @common.guarded
    def command() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(typer.Exit):
        command()
    assert capsys.readouterr().err.startswith("the disk of the run folder is full; make room")


def test_a_view_that_cannot_be_closed_does_not_hide_what_ended_the_run() -> None:
    class FullDisk:
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def on_event(self, event: object) -> None: ...

    with pytest.raises(RollartError, match="the cause"), api._closed(FullDisk()):
        raise RollartError("the cause")
    with pytest.raises(OSError, match="No space left"), api._closed(FullDisk()):
        pass


@pytest.mark.parametrize("command", ["check", "train"])
def test_an_environment_that_refuses_its_arguments_is_reported_before_anything_starts(
    tmp_path: Path, command: str
) -> None:
    path = write(tmp_path, {"args": {"nonsense": 3}}, output=str(tmp_path / "runs"))
    shown = CliRunner().invoke(app, [command, str(path)])
    assert shown.exit_code != 0
    assert "tasks.t.env: a trial reset of rollart.envs.guess_number:GuessNumber failed: TypeError" in shown.output
    assert "unexpected keyword argument 'nonsense'" in shown.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("section", "built"), [("engine", "None"), ("training", "None"), ("engine", "'12.8'")])
def test_a_gpu_that_torch_is_not_built_for_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, built: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {built}\nhip = None\n")
    monkeypatch.setattr(preflight, "find_spec", lambda name: SimpleNamespace(origin=tmp_path / name / "__init__.py"))
    run = write(tmp_path, **{section: {"device": "cuda"}})
    if built == "None":
        with pytest.raises(ConfigError, match=rf"{section}\.device is cuda, but torch here is a build for CPUs"):
            preflight.load_run(run)
    else:
        preflight.load_run(run)
    preflight.load_run(run, need_model=False)  # an evaluation of an endpoint needs no GPU
    preflight.load_run(run, here=False)


@pytest.mark.parametrize("command", ["sft", "dpo", "reward-model"])
def test_a_stage_without_data_leaves_no_run_folder(tmp_path: Path, command: str) -> None:
    shown = CliRunner().invoke(app, [command, str(write(tmp_path)), "--output", str(tmp_path / "runs")])
    assert shown.exit_code == 2 and "the run file has no" in shown.stderr
    assert not (tmp_path / "runs").exists()
