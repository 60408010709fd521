"""`rollart replay`: train a run again from its records, and compare."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollart.app.commands.common import AsJson, RunDir, console_for, guarded, print_json, say
from rollart.core.errors import RollartError


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
    control: Annotated[
        bool, typer.Option("--control", help="Take the decisions of scheduler and router again, in place of the steps.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a run again from its ledger, and compare the weights of every version, bit for bit.

    Every batch is rebuilt as it was trained; the trainer of the run takes the
    steps. The run folder is only read. Nothing is generated again: tokens,
    rewards and logprobs are those in the ledger. Exits with 1 at a difference.

    The ledger keeps the last 100 steps. To replay a longer run from its first
    step, train it with  --set ledger.keep=all

    With --control, scheduler, router and batcher decide again from what they
    got from outside, on virtual time, and every decision is compared. That is
    recorded if the run is trained with  --set ledger.control=true

    [dim]rollart replay runs/quickstart-1
    rollart replay runs/quickstart-1 --from 480 --to 500
    rollart replay runs/quickstart-1 --control[/dim]
    """
    if control:
        if anyway or first is not None or last is not None:
            raise RollartError("--control replays a run from its start to its end; leave out --from, --to and --anyway")
        _replay_control(run_dir, as_json)
        return
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


def _replay_control(run_dir: Path, as_json: bool) -> None:
    from rollart.fleet.control_replay import replay_control

    result = replay_control(run_dir)
    with console_for(as_json) as console:
        if result.difference:
            say(console, f"the control plane decides otherwise: {result.difference}")
        else:
            starts = "1 start" if result.sessions == 1 else f"{result.sessions} starts"
            say(console, f"{result.decisions:,} decisions of {starts} of the run are identical")
    if as_json:
        print_json({"identical": result.identical, **asdict(result)})
    if not result.identical:
        raise typer.Exit(1)
