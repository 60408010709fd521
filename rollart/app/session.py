"""A run in front of a user: started, watched until it ends, and left with its pictures and a few last words."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from rollart.config import RunFile
from rollart.core import run_folder
from rollart.core.event_log import EventLog, read_events
from rollart.fleet import controller as controller
from rollart.observe import curves, live, timeline
from rollart.observe.metrics import measure
from rollart.observe.report import results, scores
from rollart.observe.tensorboard import TensorBoard


def train(run: RunFile, folder: Path, *, resume: bool, console: Console, again: str) -> dict[str, Any]:
    """Train in `folder` and answer with the summary. `again` is the command that goes on if the run is stopped."""
    _say(console, f"run folder: {folder}")
    with ExitStack() as stack:
        view = stack.enter_context(live.view(console, _weights(run)))

        def watch(log: EventLog) -> None:
            board = TensorBoard(folder / "tensorboard")
            stack.callback(board.close)
            past = list(read_events(folder / "events.jsonl"))
            board.remember(past)
            view.remember(past)
            log.subscribe(board.on_event)
            view.attach(log)

        try:
            summary = asyncio.run(controller.train(run, folder, resume=resume, on_log=watch))
        except (KeyboardInterrupt, asyncio.CancelledError):
            stack.close()
            _say(console, f"stopped; go on with: {again}")
            raise
    _draw(folder, console)
    return summary


def evaluate(run: RunFile, model: Path, folder: Path, console: Console) -> dict[str, Any]:
    with live.view(console, _weights(run)) as view:
        result = asyncio.run(controller.evaluate(run, model, directory=folder, on_log=view.attach))
    console.print(scores(view.metrics.snapshot()))
    return result


def _weights(run: RunFile) -> dict[str, float]:
    return {task.name: task.weight for task in run.tasks}


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _draw(folder: Path, console: Console) -> None:
    """The pictures of a run that ended, and where things are."""
    log = run_folder.events_of(folder)
    shot = measure(read_events(log))
    curves.write(shot, folder / "curves.png")
    timeline.write(read_events(log), folder / "timeline.json")
    console.print()
    console.print(results(shot))
    console.print()
    _say(console, f"model:           {folder / 'model'}")
    _say(console, f"learning curves: {folder / 'curves.png'}")
    _say(console, f"timeline:        {folder / 'timeline.json'}  (open it in https://ui.perfetto.dev)")
    _say(console, f"more:            rollart show {folder}")
