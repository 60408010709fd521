"""`rollart train` and `rollart eval`: the Python API in front of a user."""

import asyncio
import contextlib
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
from rollart.app.commands.dashboard import beside

if TYPE_CHECKING:
    from rollart.app.run_reader import RunFolder

TASKS_OUT = 3  # exit code of a run that finished without all of its tasks
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
    with_dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Serve the run in the browser for as long as it trains.")
    ] = False,
) -> None:
    """Train an agent as the run file says.

    Leaves a folder with the model (Hugging Face format), checkpoints, event
    log, ledger, learning curves and TensorBoard files. Stop it with
    Ctrl-C and continue with --resume: nothing is lost or trained twice. The
    exit code is 3 if tasks were in quarantine at the end.

    [dim]rollart train examples/quickstart.yaml
    rollart train examples/quickstart.yaml --set training.steps=50
    rollart train examples/quickstart.yaml --resume
    rollart train examples/quickstart.yaml --dashboard[/dim]
    """
    run_training(
        "train",
        run_file,
        with_output(overrides, output),
        run_dir,
        resume=resume,
        as_json=as_json,
        with_dashboard=with_dashboard,
    )


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
    run_training("sft", run_file, with_output(overrides, output), run_dir, resume=resume, as_json=as_json)


@guarded
def evaluate(
    run_file: RunPath,
    model: ModelDir,
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="An OpenAI-compatible API, up to /v1; --model is a name there. Its key: OPENAI_API_KEY."
        ),
    ] = None,
    overrides: Overrides = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Play the held-out episodes of every task with a saved model.

    Prints success with its 95% interval, and reward, by task. The episodes
    stay in a run folder, where `rollart trajectory` reads them.

    With --set evaluation.samples=8, each episode is tried eight times: pass@8.

    [dim]rollart eval examples/quickstart.yaml --model runs/quickstart-1/model
    rollart eval RUN.yaml --endpoint http://host:8000/v1 --model Qwen3-8B[/dim]
    """
    from rollart.app import api
    from rollart.app.run_reader import RunFolder
    from rollart.observe.report import scores

    run = api.load_run(run_file, with_output(overrides, output), need_model=False)
    with console_for(as_json) as console:
        found = api.evaluate(run, model, endpoint=endpoint, console=console)
        console.print(scores(RunFolder(found.folder).snapshot()))
        say(console, f"run folder: {found.folder}")
    if as_json:
        print_json(asdict(found))


def run_training(
    command: str,
    run_file: Path,
    overrides: list[str],
    run_dir: Path | None,
    *,
    resume: bool,
    as_json: bool,
    with_dashboard: bool = False,
) -> None:
    """Carry out a stage, `command`, and print its results."""
    from rollart.app import api, preflight

    run = api.load_run(run_file, overrides)
    preflight.check_stage(run, command)
    preflight.try_resets(run, only_bugs=True)
    folder = api.folder_for(run, run_dir, resume=resume)
    with console_for(as_json) as console, contextlib.ExitStack() as stack:
        for line in preflight.advice(run):
            console.print(line, style="yellow", soft_wrap=True)
        say(console, f"run folder: {folder}")
        if with_dashboard:
            say(console, f"dashboard:  {stack.enter_context(beside(folder))}")
        try:
            trained = api.train(run, folder=folder, resume=resume, console=console, stage=command)
        except (KeyboardInterrupt, asyncio.CancelledError):
            say(console, f"stopped; continue with: rollart {command} {run_file} --resume --run-dir {folder}")
            raise
        if command != "sft":
            _print_results(trained, console)
        else:
            say(console, f"model: {trained.model}")
    summary = trained.summary()
    if as_json:
        print_json(summary)
    if any(task.get("out") for task in summary["tasks"].values()):
        raise typer.Exit(TASKS_OUT)


def with_output(overrides: list[str] | None, output: Path | None) -> list[str]:
    return [*(overrides or []), *([f"output={json.dumps(str(output))}"] if output else [])]


def _print_results(trained: "RunFolder", console: Console) -> None:
    from rollart.observe.report import results

    console.print()
    console.print(results(trained.snapshot()))
    console.print()
    say(console, f"model:           {trained.model}")
    say(console, f"learning curves: {trained.path / 'curves.png'}")
    say(console, f"timeline:        rollart timeline {trained.path}")
    say(console, f"more:            rollart show {trained.path}")
