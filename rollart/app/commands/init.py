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
    template: Annotated[Template, typer.Argument(metavar="KIND", help="quickstart, env, tools, agent or dataset.")],
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
        lines = (named(line, name) for line in source.read_text(encoding="utf-8").splitlines(keepends=True))
        target.write_text("".join(lines), encoding="utf-8")
        typer.echo(f"  {target}")
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"next:  {there}rollart train run.yaml")


def named(line: str, name: str) -> str:
    """With the name of the project in its place; a comment after it stays in its column if there is room.

    >>> named("rollart show runs/NAME-1                # look at the run", "prices")
    'rollart show runs/prices-1              # look at the run'
    """
    code, mark, comment = line.partition("  #")
    renamed = code.replace("NAME", name)
    return f"{renamed.rstrip():<{len(code)}}{mark}{comment}" if mark and renamed != code else line.replace("NAME", name)
