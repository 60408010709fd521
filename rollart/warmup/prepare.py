"""The model that a run starts from: the user's own folder, or one made and warmed up here, in a child process.

The child reads its spec from the first line of stdin and writes progress to stdout, one JSON object per line; the last
one holds the folder, or the error. It exits when its stdin closes, so it never outlives the controller.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rollart.config import RunFile, WarmupConfig
from rollart.core.errors import ConfigError, RollartError, ServiceError
from rollart.core.seeds import seed_of
from rollart.models import tiny
from rollart.models.chat import ChatRenderer, conversation_tokens
from rollart.models.folder import is_model
from rollart.warmup.demonstrations import demonstrate

PROGRESS_TIMEOUT = 300.0
REPORT_EVERY = 500


@dataclass(frozen=True, slots=True)
class Progress:
    """`value` is the success rate of a task's demonstrations once all are done, or the loss of the warmup."""

    stage: Literal["demonstrations", "warmup"]
    done: int
    total: int
    task: str = ""
    value: float | None = None


OnProgress = Callable[[Progress], None]


def prepare(run: RunFile, path: Path, on_progress: OnProgress) -> Path:
    """The user's folder if there is nothing to do, else `path`, which is made unless an earlier call did."""
    source, warmup = run.model.path, run.model.warmup
    if source is not None and not is_model(source):
        raise ConfigError(f"model.path: {source} is not a Hugging Face folder with safetensors and a tokenizer")
    if source is not None and warmup is None:
        return source
    if is_model(path):
        return path
    with tempfile.TemporaryDirectory(prefix="rollart-") as scratch:
        if source is None:
            assert run.model.tiny is not None
            made = path if warmup is None else Path(scratch) / "model"
            source = tiny.make(run.model.tiny, made, seed_of(run.seed, "model"))
        if warmup is not None:
            _warmup(run, warmup, source, path, on_progress)
    return path


def _warmup(run: RunFile, config: WarmupConfig, source: Path, path: Path, on_progress: OnProgress) -> None:
    data = demonstration_tokens(run, config.demonstrations, ChatRenderer(source), on_progress)

    from rollart.warmup.imitation import imitate

    def on_step(step: int, steps: int, loss: float) -> None:
        on_progress(Progress("warmup", step, steps, value=loss))

    seed = seed_of(run.seed, "warm-up")
    imitate(source, path, data, config, seed=seed, threads=run.training.threads, on_step=on_step)


def demonstration_tokens(
    run: RunFile, count: int, renderer: ChatRenderer, on_progress: OnProgress
) -> list[tuple[list[int], list[int]]]:
    """Tokens and mask of `count` conversations of every task; cut off at the task's `max_context`."""
    data: list[tuple[list[int], list[int]]] = []
    for task in run.tasks:

        def report(done: int, name: str = task.name) -> None:
            if done % REPORT_EVERY == 0 and done < count:
                on_progress(Progress("demonstrations", done, count, name))

        made = demonstrate(task, count, run.seed, on_progress=report)
        for episode in made.episodes:
            tokens, mask = conversation_tokens(renderer, episode.turns)
            if any(mask[: task.max_context]):
                data.append((tokens[: task.max_context], mask[: task.max_context]))
        on_progress(Progress("demonstrations", count, count, task.name, made.success))
    return data


async def prepare_in_child(run: RunFile, path: Path, on_progress: OnProgress, log: Path) -> Path:
    """`prepare` in a process of its own, whose standard error goes to `log`. Cancelling kills it."""
    threads = str(run.training.threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as errors:  # noqa: ASYNC230 (opens at once)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rollart.warmup.prepare"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            env=os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            start_new_session=True,
        )
    try:
        assert child.stdin is not None
        child.stdin.write(json.dumps({"run": run.model_dump(mode="json"), "path": str(path)}).encode() + b"\n")
        return await _follow(child, on_progress, log)
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def _follow(child: Process, on_progress: OnProgress, log: Path) -> Path:
    assert child.stdout is not None
    while True:
        try:
            line = await asyncio.wait_for(child.stdout.readline(), PROGRESS_TIMEOUT)
        except TimeoutError:
            raise ServiceError(f"preparing the model made no progress for {PROGRESS_TIMEOUT:g} s; see {log}") from None
        if not line:
            raise ServiceError(f"preparing the model ended without a model (exit code {await child.wait()}); see {log}")
        message = json.loads(line)
        if "error" in message:
            raise RollartError(message["error"])
        if "path" in message:
            return Path(message["path"])
        on_progress(Progress(**message))


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        path = prepare(RunFile(**spec["run"]), Path(spec["path"]), lambda progress: _write(asdict(progress)))
    except RollartError as error:
        _write({"error": str(error)})
    else:
        _write({"path": str(path)})


def _write(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _exit_with_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
