"""`rollart init`: a small project that trains at once."""

import re
import shlex
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from rollart.app.commands.common import guarded
from rollart.core.errors import RollartError


class Template(StrEnum):
    quickstart = "quickstart"
    env = "env"
    tools = "tools"
    agent = "agent"
    dataset = "dataset"


@guarded
def init(
    template: Annotated[
        Template, typer.Argument(metavar="quickstart|env|tools|agent|dataset", help="What the project is about.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
) -> None:
    """Write a small project that trains at once: run file, code, tests, README.

    quickstart: three games that ship with rollart, about five minutes.
    env: an environment class of your own. tools: one with tools for the policy.
    agent: a program that drives itself. dataset: questions and answers in a file, with a reward function.
    The last four train a tiny model in minutes; none needs a download.

    [dim]rollart init env my-task && cd my-task && rollart train run.yaml[/dim]
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RollartError(f"{folder} exists and is not an empty folder; choose another")
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", folder.resolve().name).strip("-") or "project"
    folder.mkdir(parents=True, exist_ok=True)
    for source in sorted((files("rollart.app") / "templates" / template).iterdir(), key=lambda source: source.name):
        target = folder / source.name.removesuffix(".txt")
        target.write_text(source.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
        typer.echo(f"  {target}")
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"next:  {there}rollart train run.yaml")
