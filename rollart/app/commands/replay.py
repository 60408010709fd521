"""`rollart replay`: train a run again from its records, and compare."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from rollart.app.commands.common import AsJson, RunDir, console_for, guarded, print_json, say


@guarded
def replay(
    run_dir: RunDir,
    first: Annotated[
        int | None, typer.Option("--from", metavar="V", min=0, help="Begin at version V, or the checkpoint before it.")
    ] = None,
    last: Annotated[int | None, typer.Option("--to", metavar="W", min=1, help="End at version W.")] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Also with another CPU, GPU, torch or number of threads than the run had.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a run again from its ledger, and compare the weights of every version, bit for bit.

    Every batch is rebuilt as it was trained; the trainer of the run takes the
    steps. The run folder is only read. Nothing is generated again: tokens,
    rewards and logprobs are those in the ledger. Exits with 1 at a difference.

    The ledger keeps the last 100 steps. To replay a longer run from its first
    step, train it with  --set ledger.keep=all

    [dim]rollart replay runs/quickstart-1
    rollart replay runs/quickstart-1 --from 480 --to 500[/dim]
    """
    from rollart.fleet import replay as replaying

    with console_for(as_json) as console:

        def show(version: int, same: bool | None) -> None:
            verdict = {True: "identical", False: "different", None: "not published, so not compared"}[same]
            say(console, f"version {version}: {verdict}")

        result = asyncio.run(replaying.replay(run_dir, first=first, last=last, anyway=anyway, on_version=show))
        found = result.difference
        if found is not None:
            say(
                console,
                f"step {found.step} gave other weights: {found.tensor} is the first of {found.tensors} that differ",
            )
        else:
            say(console, f"{result.compared} versions after {result.start} are identical, the last {result.end}")
    if as_json:
        print_json({"identical": result.identical, **asdict(result)})
    if not result.identical:
        raise typer.Exit(1)
