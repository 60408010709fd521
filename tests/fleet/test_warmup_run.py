"""The warmup of a run on its real trainer: interrupted, killed and gone on with, it gives the same weights."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from rollart.config import RunFile
from rollart.core.errors import RollartError
from rollart.core.event_log import EventLog, read_events
from rollart.core.events import AnyEvent, RunEnded, ServiceStarted, StepDone, WarmupStep, Warned
from rollart.fleet import controller
from rollart.models.folder import is_model

pytestmark = pytest.mark.slow

STEPS = 9


def run_file(**more: Any) -> RunFile:
    game = "rollart.envs.guess_number"
    task = {
        "name": "guess_number",
        "env": f"{game}:GuessNumber",
        "player": f"{game}:player",
        "player_args": {"skill": 0.5},
        "max_turns": 4,
        "max_context": 160,
        "sampling": {"max_tokens": 5},
    }
    warmup = {"demonstrations": 40, "steps": STEPS, "batch": 6, "checkpoint_every": 4}
    return RunFile.model_validate(
        {
            "name": "warm",
            "model": {"tiny": {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "context": 256}, "warmup": warmup},
            "tasks": [task],
            "training": {"steps": 1, "batch_groups": 2, "group_size": 2, "algorithm": {"kl": 0.1}},
            "evaluation": {"every": 0, "episodes": 2, "final_episodes": 2},
            **more,
        }
    )


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def steps(folder: Path) -> list[int]:
    return [event.step for event in read_events(folder / "events") if isinstance(event, WarmupStep)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A warmup that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    asyncio.run(controller.train(run_file(), folder, stage="sft"))
    return folder


def test_supervised_training_alone_leaves_a_model_and_nothing_else(whole: Path) -> None:
    assert steps(whole) == list(range(1, STEPS + 1))
    assert is_model(whole / "model") and weights(whole / "model") == weights(whole / "start")
    assert not (whole / "warmup").exists()
    assert not {"optimizer.safetensors", "checkpoint.json"} & {file.name for file in (whole / "model").iterdir()}
    assert [event.name for event in read_events(whole / "events") if isinstance(event, ServiceStarted)] == ["trainer"]


def test_rl_goes_on_from_the_model_of_the_warmup_which_is_not_made_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.yaml", "ledger.sqlite"):
        (folder / name).write_bytes((whole / name).read_bytes())
    shutil.copytree(whole / "events", folder / "events")
    (folder / "start").symlink_to(whole / "start")
    summary = asyncio.run(controller.train(run_file(), folder, resume=True))
    assert summary["version"] == 1
    assert steps(folder) == list(range(1, STEPS + 1))
    assert any(isinstance(event, StepDone) for event in read_events(folder / "events"))


def _kill_the_trainer_at(number: int, times: int) -> Any:
    def subscribe(log: EventLog) -> None:
        pids: list[int] = []
        left = [times]

        def watch(event: AnyEvent) -> None:
            if isinstance(event, ServiceStarted):
                pids.append(event.pid)
            if isinstance(event, WarmupStep) and event.step == number and left[0]:
                left[0] -= 1
                os.kill(pids[-1], signal.SIGKILL)

        log.subscribe(watch)

    return subscribe


def test_a_killed_trainer_goes_on_from_the_checkpoint(whole: Path, tmp_path: Path) -> None:
    asyncio.run(controller.train(run_file(), tmp_path / "run", stage="sft", on_log=_kill_the_trainer_at(6, 1)))
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9]
    warnings = [event.message for event in read_events(tmp_path / "run" / "events") if isinstance(event, Warned)]
    assert any("the warmup goes on from step 4" in warning and "SIGKILL" in warning for warning in warnings)
    assert weights(tmp_path / "run" / "model") == weights(whole / "model")


def test_an_interrupted_warmup_resumes_with_the_same_examples(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    async def interrupt() -> None:
        reached = asyncio.Event()

        def watch(event: AnyEvent) -> None:
            if isinstance(event, WarmupStep) and event.step == 5:
                reached.set()

        work = asyncio.create_task(
            controller.train(run_file(), folder, stage="sft", on_log=lambda log: log.subscribe(watch))
        )
        async with asyncio.timeout(120):
            await reached.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(interrupt())
    assert not (folder / "start").exists()
    assert [event.reason for event in read_events(folder / "events") if isinstance(event, RunEnded)] == ["interrupted"]
    examples = (folder / "warmup" / "examples" / "tokens").stat().st_mtime_ns
    seen: list[int] = []

    def note(event: AnyEvent) -> None:
        if isinstance(event, WarmupStep) and not seen:
            seen.append((folder / "warmup" / "examples" / "tokens").stat().st_mtime_ns)

    asyncio.run(controller.train(run_file(), folder, resume=True, stage="sft", on_log=lambda log: log.subscribe(note)))
    assert seen == [examples]
    assert steps(folder)[-5:] == [5, 6, 7, 8, 9]
    assert weights(folder / "model") == weights(whole / "model")


def test_conversations_of_a_file_are_learnt_on_several_ranks(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": word}]}
        for word in ("yes", "no", "maybe")
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = {"tiny": run_file().model.tiny, "warmup": {"conversations": file, "steps": 20, "batch": 3, "lr": 1e-2}}
    pools = {"trainers": {"role": "train", "device": "cpu", "count": 2}}
    losses: list[float] = []

    def note(event: AnyEvent) -> None:
        if isinstance(event, WarmupStep):
            losses.append(event.loss)

    folder = tmp_path / "run"
    run = run_file(model=model, pools=pools)
    asyncio.run(controller.train(run, folder, stage="sft", on_log=lambda log: log.subscribe(note)))
    assert losses[-1] < 0.5 * losses[0]
    started = [event.name for event in read_events(folder / "events") if isinstance(event, ServiceStarted)]
    assert len(started) == 2
    assert is_model(folder / "model")


def test_an_error_of_the_examples_ends_the_run_with_its_sentence(tmp_path: Path) -> None:
    model = {"tiny": run_file().model.tiny, "warmup": {"conversations": tmp_path / "nothing.jsonl"}}
    with pytest.raises(RollartError, match="cannot read the conversations"):
        asyncio.run(controller.train(run_file(model=model), tmp_path / "run", stage="sft"))
