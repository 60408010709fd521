"""`rollart play`: one episode in the terminal."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollart.app.commands.common import Overrides, RunPath, guarded
from rollart.core.errors import ConfigError


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

    Each line that you type is an action; Ctrl-D quits. The program of an agent
    runs, and you, or a model, answer its requests.

    [dim]rollart play examples/quickstart.yaml frozen_lake
    rollart play examples/quickstart.yaml guess_number --player scripted --tokens
    rollart play examples/quickstart.yaml column_sum --player runs/quickstart-1/model[/dim]
    """
    from rollart.app import preflight
    from rollart.play.agent import play_agent
    from rollart.play.episode import play as episode
    from rollart.play.episode import task_of

    saved = player not in ("human", "scripted")
    if saved and not (Path(player) / "config.json").is_file():
        raise ConfigError(f"--player is human, scripted or a model folder; {player} has no config.json")
    load = partial(preflight.load_run, run_file, overrides or [], weights=False, only_task=task)
    run = load(need_model=tokens and not saved)
    agent = task_of(run, task).agent is not None
    if agent and not saved:
        run = load(need_model=True)  # its tokenizer and template are the gateway's
    console = Console(highlight=False)
    playing = (play_agent if agent else episode)(
        run, task_of(run, task), seed=seed, held_out=held_out, player=player, tokens=tokens, console=console
    )
    asyncio.run(playing)
