import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollart.config import RunFile
from rollart.core.errors import ConfigError, RollartError
from rollart.models import tiny
from rollart.models.folder import is_model
from rollart.warmup.prepare import Progress, prepare, prepare_in_child

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
    run = run_file({"tiny": TINY})
    folder = prepare(run, tmp_path / "own", ignore)
    path = tmp_path / "start"
    assert prepare(run_file({"path": folder}), path, ignore) == folder
    assert not path.exists()


def test_a_path_without_a_model_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* is not a Hugging Face folder"):
        prepare(run_file({"path": tmp_path}), tmp_path / "start", ignore)


def test_a_tiny_model_depends_on_the_seed_of_the_run_alone(tmp_path: Path) -> None:
    run = run_file({"tiny": TINY})
    first, again = (prepare(run, tmp_path / name, ignore) for name in "ab")
    other = prepare(run.model_copy(update={"seed": 1}), tmp_path / "c", ignore)
    assert weights(first) == weights(again) != weights(other)


def test_a_warmup_trains_on_demonstrations_and_reports(tmp_path: Path) -> None:
    seen: list[Progress] = []
    folder = prepare(run_file({"tiny": TINY, "warmup": WARMUP}), tmp_path / "start", seen.append)
    untrained = prepare(run_file({"tiny": TINY}), tmp_path / "scratch", ignore)
    assert is_model(folder)
    assert weights(folder) != weights(untrained)
    demonstrated, *steps = seen
    assert (demonstrated.stage, demonstrated.task, demonstrated.done) == ("demonstrations", "guess", 20)
    assert demonstrated.value is not None and 0 < demonstrated.value <= 1
    assert [(each.stage, each.done, each.total) for each in steps] == [("warmup", done, 3) for done in (1, 2, 3)]


def test_a_prepared_model_is_not_made_again(tmp_path: Path) -> None:
    run = run_file({"tiny": TINY})
    made = weights(prepare(run, tmp_path / "start", ignore))
    assert weights(prepare(run.model_copy(update={"seed": 1}), tmp_path / "start", ignore)) == made


def test_a_conversation_is_cut_at_the_tasks_context(tmp_path: Path) -> None:
    from rollart.models.chat import ChatRenderer
    from rollart.warmup.prepare import demonstration_tokens

    tiny.tokenizer(128).save_pretrained(tmp_path)
    data = demonstration_tokens(run_file({"tiny": TINY}, max_context=12), 50, ChatRenderer(tmp_path), ignore)
    assert data and max(len(tokens) for tokens, _ in data) == 12
    assert all(len(tokens) == len(mask) and any(mask) for tokens, mask in data)


@pytest.mark.slow
def test_a_child_process_prepares_the_same_model(tmp_path: Path) -> None:
    run = run_file({"tiny": TINY, "warmup": WARMUP})
    seen: list[Progress] = []
    folder = asyncio.run(prepare_in_child(run, tmp_path / "child", seen.append, tmp_path / "logs" / "prepare.log"))
    assert folder == tmp_path / "child"
    assert weights(folder) == weights(prepare(run, tmp_path / "here", ignore))
    assert [each.stage for each in seen] == ["demonstrations", *["warmup"] * 3]


def test_an_error_in_the_child_is_reported_as_a_sentence(tmp_path: Path) -> None:
    run = run_file({"path": tmp_path / "nowhere"})
    with pytest.raises(RollartError, match="is not a Hugging Face folder"):
        asyncio.run(prepare_in_child(run, tmp_path / "child", ignore, tmp_path / "prepare.log"))


@pytest.mark.slow
def test_the_child_ends_when_its_parent_does(tmp_path: Path) -> None:
    endless = run_file({"tiny": TINY, "warmup": WARMUP | {"steps": 1_000_000}})
    child = subprocess.Popen(
        [sys.executable, "-m", "rollart.warmup.prepare"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        spec = {"run": endless.model_dump(mode="json"), "path": str(tmp_path / "start")}
        child.stdin.write(json.dumps(spec).encode() + b"\n")
        child.stdin.flush()
        while json.loads(child.stdout.readline())["stage"] != "warmup":
            pass
        child.stdin.close()
        assert child.wait(timeout=30) == 1
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert not is_model(tmp_path / "start")


@pytest.mark.slow
def test_cancelling_kills_the_child(tmp_path: Path) -> None:
    endless = run_file({"tiny": TINY, "warmup": WARMUP | {"steps": 1_000_000}})

    async def cancel_at_the_first_step() -> None:
        training = asyncio.Event()

        def watch(progress: Progress) -> None:
            if progress.stage == "warmup":
                training.set()

        work = asyncio.create_task(prepare_in_child(endless, tmp_path / "start", watch, tmp_path / "prepare.log"))
        async with asyncio.timeout(120):
            await training.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancel_at_the_first_step())
    assert not is_model(tmp_path / "start")
