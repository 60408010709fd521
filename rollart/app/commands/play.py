"""`rollart play`: one episode in the terminal."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from rollart.app.commands.common import Overrides, RunPath, guarded


@guarded
def play(
    run_file: RunPath,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The name of one of its tasks.")],
    seed: Annotated[int, typer.Option(min=0, help="The seed of the episode.")] = 0,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="An episode that evaluations use, not training.")
    ] = False,
    player: Annotated[
        str, typer.Option(metavar="human|scripted|DIR", help="You, the task's `player`, or the model in a folder.")
    ] = "human",
    tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids and pieces as well.")] = False,
    overrides: Overrides = None,
) -> None:
    """Play one episode of a task, and see what the agent sees.

    Each line that you type is an action; Ctrl-D quits.

    [dim]rollart play examples/quickstart.yaml frozen_lake
    rollart play examples/quickstart.yaml guess_number --player scripted --tokens
    rollart play examples/quickstart.yaml column_sum --player runs/quickstart-1/model[/dim]
    """
    from rollart.app import preflight
    from rollart.play.episode import play as episode

    tokenizer_of_run = tokens and player in ("human", "scripted")
    run = preflight.load_run(run_file, overrides or [], need_model=tokenizer_of_run, weights=False, only_task=task)
    console = Console(highlight=False)
    asyncio.run(episode(run, task, seed=seed, held_out=held_out, player=player, tokens=tokens, console=console))
