import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.config import RunFile
from rollart.core.errors import ConfigError, RollartError
from rollart.launch.launcher import WITH_PARENT
from rollart.models import tiny
from rollart.models.chat import ChatRenderer
from rollart.warmup.examples import StoredExamples
from rollart.warmup.prepare import Progress, demonstration_tokens, prepare_examples, prepare_in_child, prepare_model

TINY = {"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1}
WARMUP = {"demonstrations": 20, "steps": 3, "batch": 4}
GUESS = {
    "name": "guess",
    "env": "rollart.envs.guess_number:GuessNumber",
    "player": "rollart.envs.guess_number:player",
    "player_args": {"skill": 0.5},
    "max_turns": 4,
}


def run_file(model: dict[str, Any], **task: Any) -> RunFile:
    return RunFile.model_validate({"model": model, "tasks": [GUESS | task]})


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def ignore(progress: Progress) -> None:
    pass


def test_the_users_folder_is_used_where_it_is(tmp_path: Path) -> None:
    folder = prepare_model(run_file({"tiny": TINY}), tmp_path / "own")
    assert prepare_model(run_file({"path": folder}), tmp_path / "start") == folder
    assert not (tmp_path / "start").exists()


def test_a_path_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* is not a Hugging Face folder"):
        prepare_model(run_file({"path": tmp_path}), tmp_path / "start")


def test_a_tiny_model_depends_on_the_seed_of_the_run_alone_and_is_not_made_again(tmp_path: Path) -> None:
    run = run_file({"tiny": TINY})
    first, again = (prepare_model(run, tmp_path / name) for name in "ab")
    other = prepare_model(run.model_copy(update={"seed": 1}), tmp_path / "c")
    assert weights(first) == weights(again) != weights(other)
    made = weights(first)
    assert weights(prepare_model(run.model_copy(update={"seed": 1}), tmp_path / "a")) == made


def test_a_conversation_is_cut_at_the_tasks_context(tmp_path: Path) -> None:
    tiny.tokenizer(128).save_pretrained(tmp_path)
    run = run_file({"tiny": TINY}, max_context=12, sampling={"max_tokens": 4})
    data = list(demonstration_tokens(run, 50, ChatRenderer(tmp_path), ignore))
    assert data and max(len(tokens) for tokens, _ in data) == 12
    assert all(len(tokens) == len(mask) and any(mask) for tokens, mask in data)


def test_examples_come_from_demonstrations_and_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    file.write_text(json.dumps({"messages": messages}) + "\n")
    run = run_file({"tiny": TINY, "warmup": WARMUP | {"conversations": file}})
    tiny.tokenizer(128).save_pretrained(tmp_path / "model")
    seen: list[Progress] = []
    assert run.model.warmup is not None
    prepare_examples(run, run.model.warmup, tmp_path / "model", tmp_path / "examples", seen.append)
    assert len(StoredExamples(tmp_path / "examples")) == 21
    demonstrated, read = seen
    assert (demonstrated.stage, demonstrated.task, demonstrated.done) == ("demonstrations", "guess", 20)
    assert demonstrated.success is not None and 0 < demonstrated.success <= 1
    assert (read.stage, read.done) == ("conversations", 1)
    file.unlink()  # they are not made again
    prepare_examples(run, run.model.warmup, tmp_path / "model", tmp_path / "examples", seen.append)
    assert len(seen) == 2


@pytest.mark.slow
def test_a_child_process_prepares_the_same_model_and_examples(tmp_path: Path) -> None:
    run = run_file({"tiny": TINY, "warmup": WARMUP})
    seen: list[Progress] = []
    made: list[tuple[Path, int]] = []

    def on_model(model: Path) -> None:
        made.append((model, len(seen)))

    model, examples, log = (tmp_path / name for name in ("child", "examples", "prepare.log"))
    folder = asyncio.run(prepare_in_child(run, model, examples, log=log, on_model=on_model, on_progress=seen.append))
    assert folder == model
    assert made == [(model, 0)]  # before the demonstrations
    assert weights(folder) == weights(prepare_model(run, tmp_path / "here"))
    assert len(StoredExamples(examples)) == 20
    assert [each.stage for each in seen] == ["demonstrations"]


def test_an_error_in_the_child_is_reported_as_a_sentence(tmp_path: Path) -> None:
    run = run_file({"path": tmp_path / "nowhere"})
    with pytest.raises(RollartError, match="is not a Hugging Face folder"):
        asyncio.run(prepare_in_child(run, tmp_path / "child", tmp_path / "examples", log=tmp_path / "prepare.log"))


ENDLESS = WARMUP | {"demonstrations": 10_000_000}


@pytest.mark.slow
def test_the_child_ends_when_its_parent_does(tmp_path: Path) -> None:
    endless = run_file({"tiny": TINY, "warmup": ENDLESS})
    child = subprocess.Popen(
        [sys.executable, *WITH_PARENT, "rollart.warmup.prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        spec = {"model": str(tmp_path / "start"), "examples": str(tmp_path / "examples")}
        child.stdin.write(json.dumps({"run": endless.model_dump(mode="json"), **spec}).encode() + b"\n")
        child.stdin.flush()
        while "stage" not in json.loads(child.stdout.readline()):
            pass
        child.stdin.close()
        assert child.wait(timeout=30) == 1
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert not (tmp_path / "examples").exists()


@pytest.mark.slow
def test_cancelling_kills_the_child(tmp_path: Path) -> None:
    endless = run_file({"tiny": TINY, "warmup": ENDLESS})

    async def cancel_at_the_first_report() -> None:
        playing = asyncio.Event()
        work = asyncio.create_task(
            prepare_in_child(
                endless,
                tmp_path / "start",
                tmp_path / "examples",
                log=tmp_path / "prepare.log",
                on_progress=lambda progress: playing.set(),
            )
        )
        async with asyncio.timeout(120):
            await playing.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancel_at_the_first_report())
    assert not (tmp_path / "examples").exists()
