"""What all commands share."""

import asyncio
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console

from rollart.core.errors import RollartError

P = ParamSpec("P")
R = TypeVar("R")


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Errors that are meant for the user are sentences, not tracebacks."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except RollartError as error:
            Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None
        except (KeyboardInterrupt, asyncio.CancelledError) as error:
            raise typer.Exit(130 if isinstance(error, KeyboardInterrupt) else 143) from None

    return run
