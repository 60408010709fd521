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


@guarded
def train(
    run_file: RunPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest run of this name.")] = False,
    output: Output = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use exactly this run folder; with --resume, continue it.")
    ] = None,
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
    from rollart.app import api

    run = api.load_run(run_file, _with_output(overrides, output))
    folder = api.folder_for(run, run_dir, resume=resume)
    with console_for(as_json) as console:
        say(console, f"run folder: {folder}")
        try:
            trained = api.train(run, folder=folder, resume=resume, console=console)
        except (KeyboardInterrupt, asyncio.CancelledError):
            say(console, f"stopped; continue with: rollart train {run_file} --resume --run-dir {folder}")
            raise
        _print_results(trained, console)
    if as_json:
        print_json(trained.summary())


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
