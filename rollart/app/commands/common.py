"""What the commands share: options, where output goes, and errors as sentences."""

import asyncio
import contextlib
import errno
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import typer
from rich.console import Console

from rollart.core.errors import RollartError

P = ParamSpec("P")
R = TypeVar("R")

RunPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
RunDir = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run.")]
ScenarioPath = Annotated[Path, typer.Argument(metavar="SCENARIO.yaml", help="A run file with a `simulate` section.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the run file; repeatable. Tasks go by name: tasks.frozen_lake.weight=2",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object as the last line; everything else goes to stderr.")
]
Output = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Create the run folder in DIR instead of `output` of the run file.")
]
ModelDir = Annotated[
    Path, typer.Option(metavar="DIR", help="A model folder, a checkpoint or an adapter, for example RUN_DIR/model.")
]


_HINTS = {
    errno.ENOSPC: "; make room, or use another disk with --output",
    errno.EACCES: "; choose a folder that you may write to with --output or --run-dir",
    errno.EROFS: "; choose a folder that you may write to with --output or --run-dir",
    errno.ENOTDIR: "; --output and --run-dir must be folders",
    errno.EEXIST: "; --output and --run-dir must be folders",
}


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Errors that are meant for the user are sentences, not tracebacks."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except RollartError as error:
            _print_error(str(error))
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):  # a failed write has no name
                _print_error("the disk of the run folder is full; make room, or choose another with --output")
                raise typer.Exit(2) from None
            if error.filename is None or error.strerror is None:
                raise
            _print_error(f"{error.filename}: {error.strerror}{_HINTS.get(error.errno or 0, '')}")
            raise typer.Exit(2) from None
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 143) from None

    return run


def _print_error(text: str) -> None:
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def console_for(as_json: bool) -> Iterator[Console]:
    """The console for people. With `--json`, it is stderr, also for code that prints to stdout."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield Console(stderr=as_json, highlight=False)


def say(console: Console, text: str) -> None:
    """One line that is neither wrapped nor styled, so that paths can be copied."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value))
