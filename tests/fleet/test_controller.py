"""The whole system, real processes and all: train, interrupt, lose a service, be killed, go on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.crash import crash_and_resume
from rollart.app import preflight
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import AnyEvent, BatchTaken, Published, RolledBack, RunEnded, ServiceStarted, StepDone
from rollart.fleet import controller as controller
from rollart.rollout.ledger import SqliteLedger

pytestmark = pytest.mark.slow

RUN = """
name: small
seed: 3
model: {tiny: {hidden: 64, layers: 2, context: 256}}
tasks:
  - {name: guess_number, env: "rollart.envs.guess_number:GuessNumber", max_turns: 4, max_context: 160,
     sampling: {max_tokens: 5}}
  - {name: frozen_lake, env: "rollart.envs.frozen_lake:FrozenLake", args: {max_actions: 3}, max_turns: 3,
     max_context: 160, weight: 2, sampling: {max_tokens: 3, temperature: 0.8}}
rollout: {extra_members: 1}
training: {steps: 6, batch_groups: 6, group_size: 4, algorithm: {correction: {cap: 2.0}}}
evaluation: {every: 2, episodes: 4, final_episodes: 8}
checkpoint: {every: 2}
"""


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RUN)
    return path


def command(path: Path, folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "rollart.app.cli", "train", str(path), "--run-dir", str(folder), *more]


def events(folder: Path) -> list[Any]:
    log = folder / "events"
    return list(read_events(log))


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline, "the run did not get there in time"
        time.sleep(0.1)  # the only sleep: watching another process's file


def test_a_run_leaves_everything_that_it_promises(run_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = subprocess.run(command(run_path, folder, "--json"), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["version"] == 6 and summary["tasks"].keys() == {"guess_number", "frozen_lake"}
    for name in ("summary.json", "events", "ledger.sqlite", "run.yaml", "curves.png", "snapshot.json"):
        assert (folder / name).stat().st_size > 0, name
    assert list((folder / "tensorboard").glob("*tfevents*"))
    taken = [event for event in events(folder) if isinstance(event, BatchTaken)]
    assert [event.groups for event in taken] == [{"guess_number": 2, "frozen_lake": 4}] * 6
    assert all(age <= 1 for event in taken for age in event.staleness)
    assert SqliteLedger.open_readonly(folder / "ledger.sqlite").group_states()["consumed"] == 36
    # Engine and trainer agree on every logprob, temperature included, but for the tokens of another version.
    first = next(event for event in events(folder) if isinstance(event, StepDone))
    assert first.values["logprob_gap"] < 1e-4
    _model_is_usable(folder / "model")


def _model_is_usable(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "3 9"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**prompt, max_new_tokens=4).shape[1] > prompt["input_ids"].shape[1]


def test_ctrl_c_ends_cleanly_and_resume_finishes(run_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(command(run_path, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: any(isinstance(event, StepDone) for event in events(folder)), process)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert len(family) > 3
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert events(folder)[-1].reason == "interrupted"
    subprocess.run(command(run_path, folder, "--resume"), check=True, capture_output=True, timeout=240)
    assert [event.reason for event in events(folder) if isinstance(event, RunEnded)] == ["interrupted", "finished"]
    assert SqliteLedger.open_readonly(folder / "ledger.sqlite").group_states()["consumed"] == 36


def test_a_killed_engine_is_replaced_and_the_run_goes_on(run_path: Path, tmp_path: Path) -> None:
    run = preflight.load_run(run_path, [])
    pids: dict[str, int] = {}

    def watch(event: AnyEvent) -> None:
        if isinstance(event, ServiceStarted):
            pids.setdefault(event.name, event.pid)
        if isinstance(event, Published) and event.version == 2:
            os.kill(pids["engine-0"], signal.SIGKILL)

    summary = asyncio.run(controller.train(run, tmp_path / "run", on_log=lambda log: log.subscribe(watch)))
    assert summary["version"] == 6
    started = [event.name for event in events(tmp_path / "run") if isinstance(event, ServiceStarted)]
    assert started.count("engine-0") == 2


def _kills_the_trainer(versions: set[int]) -> Callable[[EventLog], None]:
    """At each version that it publishes, of those given."""

    def subscribe(log: EventLog) -> None:
        pids: dict[str, int] = {}

        def watch(event: AnyEvent) -> None:
            if isinstance(event, ServiceStarted):
                pids[event.name] = event.pid
            if isinstance(event, Published) and event.version in versions:
                os.kill(pids["trainer"], signal.SIGKILL)

        log.subscribe(watch)

    return subscribe


def test_a_killed_trainer_goes_on_from_its_checkpoint_and_nothing_is_lost(run_path: Path, tmp_path: Path) -> None:
    run, versions = preflight.load_run(run_path, []), {3}

    def once(log: EventLog) -> None:
        _kills_the_trainer(versions)(log)
        log.subscribe(lambda event: versions.clear() if isinstance(event, RolledBack) else None)

    summary = asyncio.run(controller.train(run, tmp_path / "run", on_log=once))
    assert (summary["version"], summary["resumes"]) == (6, 0)
    rolled = [event for event in events(tmp_path / "run") if isinstance(event, RolledBack)]
    assert len(rolled) == 1
    assert rolled[0].version < 3
    assert "SIGKILL" in rolled[0].reason
    assert SqliteLedger.open_readonly(tmp_path / "run" / "ledger.sqlite").group_states()["consumed"] == 36


def test_a_trainer_that_dies_again_and_again_ends_the_run_with_a_sentence(run_path: Path, tmp_path: Path) -> None:
    run = preflight.load_run(run_path, ["checkpoint.every=100"])
    with pytest.raises(RollartError, match=r"trainer was lost 4 times at version 0; .*--resume"):
        asyncio.run(controller.train(run, tmp_path / "run", on_log=_kills_the_trainer({1})))
    summary = asyncio.run(controller.train(run, tmp_path / "run", resume=True))
    assert (summary["version"], summary["resumes"]) == (6, 1)


def test_two_controllers_never_share_a_folder(run_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(command(run_path, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (folder / "run.yaml").exists(), process)
        second = subprocess.run(command(run_path, folder, "--resume"), capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert "another process is already training" in second.stderr
    finally:
        process.terminate()
        process.wait(30)


def test_kills_at_random_moments_lose_nothing_and_train_nothing_twice(tmp_path: Path) -> None:
    result = crash_and_resume(kills=3, seed=int.from_bytes(os.urandom(2), "little"), scratch=tmp_path)
    assert result["kills"] >= 1
    assert (result["lost"], result["trained_twice"], result["left_behind"]) == (0, 0, 0)
    assert result["finished"]
