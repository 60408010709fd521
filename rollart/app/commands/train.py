"""`rollart train` and `rollart eval`: the Python API in front of a user."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollart.app.commands.common import (
    AsJson,
    ModelDir,
    Output,
    Overrides,
    RunPath,
    console_for,
    guarded,
    print_json,
    say,
)

if TYPE_CHECKING:
    from rollart.app.run_reader import RunFolder

Resume = Annotated[bool, typer.Option("--resume", help="Continue the newest run of this name.")]
RunFolderOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Use exactly this run folder; with --resume, continue it.")
]


@guarded
def train(
    run_file: RunPath,
    overrides: Overrides = None,
    resume: Resume = False,
    output: Output = None,
    run_dir: RunFolderOption = None,
    as_json: AsJson = False,
) -> None:
    """Train an agent as the run file says.

    Leaves a folder with the model (Hugging Face format), checkpoints, event
    log, ledger, learning curves, timeline and TensorBoard files. Stop it with
    Ctrl-C and continue with --resume: nothing is lost or trained twice.

    [dim]rollart train examples/quickstart.yaml
    rollart train examples/quickstart.yaml --set training.steps=50
    rollart train examples/quickstart.yaml --resume[/dim]
    """
    _train("train", run_file, _with_output(overrides, output), run_dir, resume=resume, as_json=as_json)


@guarded
def sft(
    run_file: RunPath,
    overrides: Overrides = None,
    resume: Resume = False,
    output: Output = None,
    run_dir: RunFolderOption = None,
    as_json: AsJson = False,
) -> None:
    """Train only as `model.warmup` says: supervised, without RL.

    On demonstrations of the tasks' players, on a file of conversations, or on
    both, with the ranks and the optimizer settings of `training`. Leaves the
    model in the run folder; `rollart train --resume` continues with RL.

    [dim]rollart sft examples/quickstart.yaml
    rollart sft run.yaml --set model.warmup.conversations=chats.jsonl[/dim]
    """
    _train("sft", run_file, _with_output(overrides, output), run_dir, resume=resume, as_json=as_json)


@guarded
def evaluate(
    run_file: RunPath, model: ModelDir, overrides: Overrides = None, output: Output = None, as_json: AsJson = False
) -> None:
    """Play the held-out episodes of every task with a saved model.

    Prints success with its 95% interval, and reward, by task. The episodes
    stay in a run folder, where `rollart trajectory` reads them.

    [dim]rollart eval examples/quickstart.yaml --model runs/quickstart-1/model[/dim]
    """
    from rollart.app import api
    from rollart.app.run_reader import RunFolder
    from rollart.observe.report import scores

    run = api.load_run(run_file, _with_output(overrides, output), need_model=False)
    with console_for(as_json) as console:
        found = api.evaluate(run, model, console=console)
        console.print(scores(RunFolder(found.folder).snapshot()))
        say(console, f"run folder: {found.folder}")
    if as_json:
        print_json(asdict(found))


def _train(
    command: str, run_file: Path, overrides: list[str], run_dir: Path | None, *, resume: bool, as_json: bool
) -> None:
    """`rollart train` or `rollart sft`."""
    from rollart.app import api

    run = api.load_run(run_file, overrides)
    folder = api.folder_for(run, run_dir, resume=resume)
    with console_for(as_json) as console:
        say(console, f"run folder: {folder}")
        try:
            trained = api.train(run, folder=folder, resume=resume, console=console, rl=command == "train")
        except (KeyboardInterrupt, asyncio.CancelledError):
            say(console, f"stopped; continue with: rollart {command} {run_file} --resume --run-dir {folder}")
            raise
        if command == "train":
            _print_results(trained, console)
        else:
            say(console, f"model: {trained.model}")
    if as_json:
        print_json(trained.summary())


def _with_output(overrides: list[str] | None, output: Path | None) -> list[str]:
    return [*(overrides or []), *([f"output={json.dumps(str(output))}"] if output else [])]


def _print_results(trained: "RunFolder", console: Console) -> None:
    from rollart.observe.report import results

    console.print()
    console.print(results(trained.snapshot()))
    console.print()
    say(console, f"model:           {trained.model}")
    say(console, f"learning curves: {trained.path / 'curves.png'}")
    say(console, f"timeline:        {trained.path / 'timeline.json'}  (open it in https://ui.perfetto.dev)")
    say(console, f"more:            rollart show {trained.path}")
