"""`rollart envs`: families of environment packages, each in its own virtual environment, and hosts that serve them."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from rollart.app.commands.common import guarded
from rollart.config import ProcessLimitsConfig
from rollart.core.errors import RollartError
from rollart.core.variables import MissingVariables, passed
from rollart.envs import families

app = typer.Typer(invoke_without_command=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The family; `rollart envs` lists them.")]


@app.callback()
@guarded
def envs(context: typer.Context) -> None:
    """List, add, remove and serve families of environments.

    A family is one or more packages in a virtual environment of their own;
    a task uses it with `family: NAME`. Families are kept in the folder
    ROLLART_ENVS, or in the user's data folder. Without a command, lists them.

    [dim]rollart envs
    rollart envs add textarena[/dim]
    """
    if context.invoked_subcommand is None:
        _list(Console(highlight=False))


def _list(console: Console) -> None:
    columns = (Column(name, overflow="fold") for name in ("family", "installed", "offers"))
    table = Table(*columns, box=None, pad_edge=False, header_style="dim")
    there = {family.name: family for family in families.all_installed()}
    for name, family in families.catalogue().items():
        table.add_row(name, _state(there.pop(name, None), family), family.offers)
    for name, own in there.items():
        table.add_row(name, _state(own, None), "your own")
    console.print(table)
    console.print(f"in {families.root()}", style="dim", soft_wrap=True)


def _state(there: families.InstalledFamily | None, family: families.Family | None) -> str:
    if there is None:
        return "-"
    old = family is not None and family.requirements != there.requirements
    return f"Python {there.version}, {there.megabytes:.0f} MB{', outdated: add it --again' if old else ''}"


@app.command()
@guarded
def add(
    name: Name,
    python: Annotated[str | None, typer.Option(metavar="PATH", help="The Python to create it with.")] = None,
    requirements: Annotated[
        Path | None,
        typer.Option(
            "-r",
            "--requirements",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="The packages of a family of your own.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Install it again if it is installed.")] = False,
) -> None:
    """Install a family and test it.

    If it fails or is interrupted, nothing is left behind.

    [dim]rollart envs add textarena
    rollart envs add mine -r requirements.txt[/dim]
    """
    from rollart.envs.families import install

    family = families.choose(name, requirements.read_text() if requirements else None)
    console = Console(highlight=False)
    with console.status(name) as status:
        made = install.add(family, lambda line: status.update(f"{name}: {line[:100]}"), python=python, again=again)
    console.print(
        f"{name} is installed: Python {made.version}, {made.megabytes:.0f} MB, in {made.folder}", soft_wrap=True
    )


@app.command()
@guarded
def remove(name: Name) -> None:
    """Delete a family.

    [dim]rollart envs remove textarena[/dim]
    """
    from rollart.envs.families import install

    install.remove(name)
    typer.echo(f"{name} is removed")


@app.command()
@guarded
def python(name: Name) -> None:
    """Print the path of a family's Python, to run a program with its packages.

    [dim]$(rollart envs python openenv) -m uvicorn my_server:app[/dim]
    """
    typer.echo(families.python_of(name))


@app.command()
@guarded
def images(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", exists=True, dir_okay=False, help="The run file.")],
) -> None:
    """Pull and build the images that a run needs on this machine.

    Do it on every machine where environments or agents run, before the run:
    nothing is pulled or built while episodes wait.

    [dim]rollart envs images run.yaml[/dim]
    """
    from rollart.app.images import needed
    from rollart.config.loading import load
    from rollart.sandbox.bubblewrap import SandboxError

    found = 0
    for task in load(run_file).tasks:
        try:
            for image in needed(task):
                found += 1
                began = time.monotonic()
                here = image.is_here()
                if not here:
                    image.get()
                how = "is here" if here else f"made ready in {time.monotonic() - began:.1f} s"
                typer.echo(f"{image.task}: {image.what} {how}")
        except (SandboxError, ValueError, OSError) as error:
            raise RollartError(f"{task.name}: {error}") from None
    if not found:
        typer.echo("no task of this run needs an image")


@app.command()
@guarded
def serve(
    family: Annotated[str | None, typer.Option(metavar="NAME", help="Use the Python of this family.")] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 7070,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE:CLASS", help="Import this before forking, once for all; repeatable."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Most environments at the same time.")] = 1024,
    memory: Annotated[int, typer.Option(min=0, help="Megabytes of each environment; 0: no limit.")] = 4096,
    pass_env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A variable that environments get, besides PATH and the like; repeatable."),
    ] = None,
) -> None:
    """Serve environments to runs on other machines.

    A run names this host in `urls` of a pool, and must have the same
    ROLLART_WORKER_KEY. Keys and episodes are not encrypted: use a network that
    you trust.

    [dim]ROLLART_WORKER_KEY=secret rollart envs serve --host 0.0.0.0 --import my_envs:Lake
    ROLLART_WORKER_KEY=secret rollart envs serve --family textarena[/dim]
    """
    from rollart.workers import host as module

    if not os.environ.get(module.KEY):
        raise RollartError(module.NO_KEY)
    interpreter = str(families.python_of(family)) if family else sys.executable
    command = [interpreter, module.__file__, "--host", host, "--port", str(port), "--processes", str(processes)]
    command += ["--limits", ProcessLimitsConfig(memory=memory).model_dump_json()]
    for path in imports or []:
        command += ["--import", path]
    try:
        inherited = passed(os.environ, [module.KEY, *(pass_env or [])])
    except MissingVariables as error:
        raise RollartError(str(error)) from None
    os.execve(interpreter, command, inherited)  # this process becomes the host, so signals reach it
