"""`rollart robots`: policies for robots that imitate demonstrations, and go beyond them by RL."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rollart.app.commands.common import (
    AsJson,
    Output,
    Overrides,
    RunDir,
    console_for,
    guarded,
    print_json,
    say,
)
from rollart.core.errors import RollartError

if TYPE_CHECKING:
    from rollart.config.robots import RobotRunFile
    from rollart.robots.episodes import RobotScore

app = typer.Typer(
    no_args_is_help=True,
    help="Train robot policies by imitation, tune them by RL, evaluate and compare them.\n\n"
    "[dim]rollart robots train examples/robots/pick_place.yaml[/dim]",
)
VIDEO_PIXELS, FILMED = 160, 2
Video = Annotated[bool, typer.Option("--video", help="Film two episodes and keep a successful one, in RUN_DIR/videos.")]
Episodes = Annotated[int, typer.Option(min=1, help="Episodes to play.")]


@app.command()
@guarded
def demos(
    task: Annotated[str, typer.Argument(metavar="SUITE:TASK", help="For example metaworld:pick-place-v3.")],
    episodes: Annotated[int, typer.Option(min=1, help="Successful episodes to record.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episodes.")] = 0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: demos/TASK.npz, here.")
    ] = None,
) -> None:
    """Record demonstrations of a task's scripted expert.

    [dim]rollart robots demos metaworld:pick-place-v3 --episodes 10[/dim]
    """
    from rollart.config.robots import two_processes
    from rollart.robots import demonstrations
    from rollart.robots.record import record

    console = Console(highlight=False)
    with console.status(task) as status:

        def progress(done: int) -> None:
            status.update(f"{task}: {done}/{episodes}")

        found = asyncio.run(record(task, episodes, seed, config=two_processes(), on_progress=progress))
    path = output or Path("demos") / f"{task.replace(':', '-')}.npz"
    demonstrations.save(path, found.demonstrations)
    steps = sum(len(one.actions) for one in found.demonstrations)
    say(console, f"{path}: {episodes} episodes, {steps} steps; the expert succeeded in {episodes} of {found.tried}")


@app.command()
@guarded
def train(
    run_files: Annotated[list[Path], typer.Argument(metavar="RUN.yaml...", help="One or more run files.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest run of this name.")] = False,
    output: Output = None,
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Use exactly this run folder.")] = None,
    video: Video = False,
    as_json: AsJson = False,
) -> None:
    """Train a policy on demonstrations, and evaluate it on held-out episodes.

    Leaves a folder with the policy, checkpoints, event log and curves, which
    `rollart show` and `rollart dashboard` read. Continue with --resume.

    [dim]rollart robots train examples/robots/pick_place.yaml
    rollart robots train examples/robots/pick_place.yaml --set policy=flow[/dim]
    """
    from rollart.app.api import folder_for
    from rollart.robots import imitation
    from rollart.robots import run as robot_run
    from rollart.robots.report import score_table

    if run_dir and len(run_files) > 1:
        raise RollartError("--run-dir is the folder of one run, but there are several run files")
    changes = [*(overrides or []), *([f"output={json.dumps(str(output))}"] if output else [])]
    runs = [robot_run.load(path, changes) for path in run_files]
    if not resume:  # a run has a copy of its own
        for run in runs:
            imitation.check_demonstrations(run)
    with console_for(as_json) as console:
        scores = []
        for run in runs:
            folder = folder_for(run, run_dir, resume=resume)
            scores.append((run.task, folder, _train(console, run, folder, resume=resume)))
        console.print()
        console.print(score_table(scores))
        console.print()
        for _, folder, _ in scores:
            say(console, f"policy: {folder / 'policy'}   curves: {folder / 'curves.png'}")
    if as_json:
        print_json([_as_dict(folder) for _, folder, _ in scores] if len(scores) > 1 else _as_dict(scores[0][1]))
    if video:  # last: there may be no renderer
        with console_for(as_json) as console:
            for task, folder, _ in scores:
                _film(console, folder, task)


def _train(console: Console, run: "RobotRunFile", folder: Path, *, resume: bool) -> "RobotScore":
    from rollart.observe import live
    from rollart.robots import imitation
    from rollart.robots.report import write_curves
    from rollart.robots.suites import robot_task

    say(console, f"run folder: {folder}")
    with live.view(console, {robot_task(run.task).name: 1.0}) as view:
        score = asyncio.run(
            imitation.train(run, folder, resume=resume, on_log=lambda log: log.subscribe(view.on_event))
        )
    write_curves(folder)
    return score


@app.command()
@guarded
def tune(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file that it was trained with.")],
    start: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Tune this run's policy; default: the newest's.")
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest tuning of this name.")] = False,
    output: Output = None,
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Use exactly this run folder.")] = None,
    video: Video = False,
    as_json: AsJson = False,
) -> None:
    """Tune an imitated policy by RL, on episodes that it plays itself.

    Starts from the newest run of `rollart robots train` of the same name, in a
    folder of its own, NAME-tuned-1. Prints success before and after.

    [dim]rollart robots tune examples/robots/pick_place.yaml
    rollart robots tune examples/robots/pick_place.yaml --from runs/pick-place-1[/dim]
    """
    from rollart.app.api import folder_for
    from rollart.observe import live
    from rollart.robots import tuning
    from rollart.robots.report import write_curves
    from rollart.robots.suites import robot_task

    changes = [*(overrides or []), *([f"output={json.dumps(str(output))}"] if output else [])]
    run = tuning.load_tuning(run_file, changes)
    found = None if resume else tuning.imitated_run(run, start)
    named = run.model_copy(update={"name": f"{run.name}-tuned"})
    with console_for(as_json) as console:
        folder = folder_for(named, run_dir, resume=resume)
        say(console, f"run folder: {folder}")
        with live.view(console, {robot_task(run.task).name: 1.0}) as view:
            gain = asyncio.run(tuning.tune(run, folder, start=found, on_log=lambda log: log.subscribe(view.on_event)))
        write_curves(folder)
        change = f"{gain.mean:+.3f} ± {gain.half:.3f} (95%)"
        say(console, f"success before {gain.before:.3f}, after {gain.after:.3f}: {change}")
        say(console, f"policy: {folder / 'policy'}   curves: {folder / 'curves.png'}")
        if video:
            _film(console, folder, run.task)
    if as_json:
        about = {"before": gain.before, "after": gain.after, "gain": gain.mean, "half": gain.half}
        print_json({**_as_dict(folder), **about})


@app.command("eval")
@guarded
def evaluate(
    run_dir: RunDir,
    episodes: Episodes = 100,
    task: Annotated[
        str | None, typer.Option(metavar="SUITE:TASK", help="Another task than the one it was trained for.")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Environments at the same time.")] = None,
    video: Video = False,
    as_json: AsJson = False,
) -> None:
    """Play held-out episodes with a trained policy.

    Prints success with its 95% interval, and how long the policy takes for a chunk.

    [dim]rollart robots eval runs/pick-place-1 --episodes 100
    rollart robots eval runs/pick-place-1 --video[/dim]
    """
    from rollart.robots import run as robot_run
    from rollart.robots.report import score_table

    with console_for(as_json) as console:
        score = asyncio.run(robot_run.score_run(run_dir, episodes=episodes, task=task, processes=processes))
        name = task or robot_run.load(run_dir / "run.yaml", []).task
        robot_run.save_score(score, run_dir)
        console.print(score_table([(name, run_dir, score)]))
        if video:
            _film(console, run_dir, name)
    if as_json:
        print_json(_as_dict(run_dir))


@app.command()
@guarded
def compare(
    plan_file: Annotated[Path, typer.Argument(metavar="COMPARE.yaml", help="Tasks, policies and seeds.")],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use this folder; what it has already is not done again.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train and evaluate several policies on several tasks and seeds; print one table.

    It is drawn too, as DIR/success.png. Seeds and tasks train together, in
    stacks. Started again with --run-dir of an earlier comparison, it does only
    what is missing there.

    [dim]rollart robots compare examples/robots/benchmark.yaml[/dim]
    """
    import msgspec

    from rollart.core import run_folder
    from rollart.robots import comparison
    from rollart.robots.report import comparison_table, write_bars

    plan = comparison.load(plan_file, overrides or [])
    folder = run_dir or run_folder.create(plan.output, plan.name)
    with console_for(as_json) as console:
        say(console, f"folder: {folder}")

        def on_result(one: comparison.ComparedPolicy) -> None:
            say(console, f"{one.policy}, {one.task}, seed {one.seed}: success {one.success:.2f}")

        results = asyncio.run(comparison.compare(plan, folder, on_result))
        console.print(comparison_table(results))
        write_bars(results, folder / "success.png")
        say(console, f"picture: {folder / 'success.png'}")
    if as_json:
        print_json({"folder": str(folder), "results": msgspec.to_builtins(results)})


def _film(console: Console, run_dir: Path, task: str) -> None:
    """Raises RollartError, for example where there is no renderer."""
    from rollart.robots import run as robot_run
    from rollart.robots.video import save_video

    filmed = asyncio.run(robot_run.score_run(run_dir, episodes=FILMED, task=task, processes=1, video=VIDEO_PIXELS))
    for path in save_video(filmed, run_dir / "videos", task.replace(":", "-")):
        say(console, f"video: {path}")


def _as_dict(folder: Path) -> dict[str, object]:
    return {"folder": str(folder), **json.loads((folder / "score.json").read_text())}
