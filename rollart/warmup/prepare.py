"""What a run starts from: the user's model folder or one made here, and the examples of its warmup.

They are made in a child process, which reads its spec from the first line of stdin and writes to stdout, one JSON
object per line: progress, the model as soon as it is there, and last the examples, or the error. It exits when its
stdin closes, so it never outlives the controller. What is there already, from a run that was interrupted, is kept.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError

from rollart.config import RunFile, WarmupConfig
from rollart.core import variables
from rollart.core.errors import ConfigError, RollartError, ServiceError
from rollart.core.seeds import seed_of
from rollart.launch.child import describe, tail
from rollart.launch.launcher import WITH_PARENT
from rollart.models import tiny
from rollart.models.chat import ChatRenderer, conversation_tokens
from rollart.models.folder import atomic_folder, is_model
from rollart.warmup.conversations import read_conversations
from rollart.warmup.demonstrations import demonstrate
from rollart.warmup.examples import TokensAndMask, write_examples

PROGRESS_TIMEOUT = 300.0
REPORT_EVERY = 500


@dataclass(frozen=True, slots=True)
class Progress:
    """Of the examples. `success` is the success rate of a task's demonstrations once all are done, `left_out` counts
    the conversations of a file that are too long, once all are read."""

    stage: Literal["demonstrations", "conversations"]
    done: int
    task: str = ""
    success: float | None = None
    left_out: int = 0


OnProgress = Callable[[Progress], None]
OnModel = Callable[[Path], None]


def _ignore(news: object) -> None:
    pass


def prepare_model(run: RunFile, folder: Path) -> Path:
    """The user's model folder, or else `folder`, in which a tiny model is made unless there is one."""
    if run.model.path is None:
        if run.model.tiny is None:
            raise ConfigError(
                "model: it has sizes but no weights, which is enough to check, simulate and plan; to train, give "
                "model.path, a Hugging Face folder"
            )
        return folder if is_model(folder) else tiny.make(run.model.tiny, folder, seed_of(run.seed, "model"))
    if not is_model(run.model.path):
        raise ConfigError(f"model.path: {run.model.path} is not a Hugging Face folder with safetensors and a tokenizer")
    return run.model.path


def prepare_examples(run: RunFile, config: WarmupConfig, model: Path, folder: Path, on_progress: OnProgress) -> None:
    """Write the examples of the warmup to `folder`, unless it is there."""
    if folder.is_dir():
        return
    renderer = ChatRenderer(model, run.model.template_args)
    parts = [demonstration_tokens(run, config.per_task, renderer, on_progress)]
    if config.conversations is not None:
        longest = max(task.max_context for task in run.tasks)
        parts.append(file_tokens(config.conversations, longest, renderer, on_progress))
    with atomic_folder(folder) as draft:
        if not write_examples(draft, chain.from_iterable(parts)):
            raise ConfigError("model.warmup has nothing to learn: no answer begins within max_context of the tasks")


def demonstration_tokens(
    run: RunFile, count: int, renderer: ChatRenderer, on_progress: OnProgress
) -> Iterator[TokensAndMask]:
    """`count` conversations of every task; cut off at the task's `max_context`."""
    for task in [task for task in run.tasks if task.weight] if count else ():

        def report(done: int, name: str = task.name) -> None:
            if done % REPORT_EVERY == 0 and done < count:
                on_progress(Progress("demonstrations", done, name))

        made = demonstrate(task, count, run.seed, on_progress=report)
        for episode in made.episodes:
            tokens, mask = conversation_tokens(renderer, episode.turns)
            if any(mask[: task.max_context]):
                yield tokens[: task.max_context], mask[: task.max_context]
        on_progress(Progress("demonstrations", count, task.name, made.success))


def file_tokens(path: Path, longest: int, renderer: ChatRenderer, on_progress: OnProgress) -> Iterator[TokensAndMask]:
    """The conversations of a file, cut off at `longest` tokens; those that have no answer by then are left out."""
    done = left_out = 0
    for done, (line, turns) in enumerate(read_conversations(path), 1):
        try:
            tokens, mask = conversation_tokens(renderer, turns)
        except TemplateError as error:
            raise ConfigError(f"{path}:{line}: the chat template of the model refuses it: {error}") from error
        if any(mask[:longest]):
            yield tokens[:longest], mask[:longest]
        else:
            left_out += 1
        if done % REPORT_EVERY == 0:
            on_progress(Progress("conversations", done))
    on_progress(Progress("conversations", done, left_out=left_out))


async def prepare_in_child(
    run: RunFile,
    model: Path,
    examples: Path,
    *,
    log: Path,
    on_model: OnModel = _ignore,
    on_progress: OnProgress = _ignore,
) -> Path:
    """`prepare_model`, whose result is returned, and with a warmup `prepare_examples`, in a process of its own. Its
    standard error goes to `log`. `on_model` is called with the model while examples are still made. Cancelling kills
    it."""
    threads = str(run.training.thread_count)
    try:  # it plays the environments of demonstrations
        inherited = variables.passed(os.environ, [name for task in run.tasks for name in task.pass_env])
    except variables.MissingVariables as error:
        raise ConfigError(str(error)) from None
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as errors:  # noqa: ASYNC230 (opens at once)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, *WITH_PARENT, "rollart.warmup.prepare"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            env={**inherited, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            start_new_session=True,
        )
    try:
        assert child.stdin is not None
        spec = {"run": run.model_dump(mode="json"), "model": str(model), "examples": str(examples)}
        child.stdin.write(json.dumps(spec).encode() + b"\n")
        return await _follow(child, on_progress, on_model, log)
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def _follow(child: Process, on_progress: OnProgress, on_model: OnModel, log: Path) -> Path:
    assert child.stdout is not None
    model: Path | None = None
    while True:
        try:
            line = await asyncio.wait_for(child.stdout.readline(), PROGRESS_TIMEOUT)
        except TimeoutError:
            raise ServiceError(f"preparing the model made no progress for {PROGRESS_TIMEOUT:g} s; see {log}") from None
        if not line:
            code = await child.wait()
            raise ServiceError(f"preparing the model ended with {describe(code)}{tail(log, lines=1)}")
        message = json.loads(line)
        if "error" in message:
            raise RollartError(message["error"])
        if "model" in message:
            model = Path(message["model"])
            on_model(model)
        elif "prepared" in message and model is not None:
            return model
        else:
            on_progress(Progress(**message))


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    run = RunFile(**spec["run"])
    try:
        model = prepare_model(run, Path(spec["model"]))
        _write({"model": str(model)})
        if run.model.warmup is not None:
            examples = Path(spec["examples"])
            prepare_examples(run, run.model.warmup, model, examples, lambda progress: _write(asdict(progress)))
    except RollartError as error:
        _write({"error": str(error)})
    except OSError as error:
        _write({"error": f"the model could not be prepared: {error}"})
    else:
        _write({"prepared": True})


def _write(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
