"""`rollart simulate`: a scenario on virtual time."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rollart.app.commands.guard import guarded


@guarded
def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.yaml", help="A run file with a `simulate` section.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; repeatable.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="sync, sync_plus, one_off, start_bound or rollart.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="One row per value; KEY,KEY=A:B,C:D changes keys together; repeatable.",
        ),
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Override the `simulate` section with this file.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The first seed; default: the scenario's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, one simulation each.")] = 1,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="Make the run folder in here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")] = False,
) -> None:
    """Predict step time, throughput, idle times and cost of a run, without its hardware.

    The scheduler of real runs schedules modelled engines, environments,
    rewards and training on a virtual clock. The event log goes into a run
    folder, so `rollart show` and `rollart timeline` work on it.

    [dim]rollart simulate examples/paper/end_to_end.yaml
    rollart simulate examples/paper/end_to_end.yaml --preset sync_plus --seeds 3
    rollart simulate examples/paper/end_to_end.yaml --sweep rollout.alpha=0,1,2,3[/dim]
    """
    from rollart.core import run_folder
    from rollart.simulate import scenario as scenarios
    from rollart.simulate.report import report, summary
    from rollart.simulate.simulation import simulate as run

    if sweep:
        _sweep(scenario, sweep, overrides or [], preset, workload, seed, seeds, as_json)
        return
    asked = scenarios.load(scenario, overrides or [], workload)
    if preset is not None:
        asked = asked.with_preset(preset)
    first = asked.seed if seed is None else seed
    folder = run_folder.create(output or asked.output, asked.name) if asked.simulate.log == "full" else None
    console = Console(stderr=as_json, highlight=False)
    if guessed := [task.name for task in asked.tasks if task.name not in asked.simulate.workloads]:
        warning = f"simulate.workloads has no {', '.join(guessed)}, so turns, tokens and times are defaults"
        console.print(f"{warning}; `rollart calibrate` fits them to a real run", style="yellow", markup=False)
    with Console(stderr=True).status("simulating") as status:

        def show_progress(step: int, seconds: float) -> None:
            status.update(f"step {step} of {asked.training.steps}, {seconds:,.0f} s simulated")

        results = [
            run(asked, folder=None if number else folder, seed=first + number, on_progress=show_progress)
            for number in range(seeds)
        ]
    console.print(report(results))
    if folder is not None:
        console.print(f"run folder: {folder}", soft_wrap=True, markup=False)
    if as_json:
        typer.echo(json.dumps({**summary(results), "folder": str(folder) if folder else None}))


def _sweep(
    scenario: Path,
    sweep: list[str],
    overrides: list[str],
    preset: str | None,
    workload: Path | None,
    seed: int | None,
    seeds: int,
    as_json: bool,
) -> None:
    """Every point is checked before the first is simulated; no run folders are made."""
    from rollart.simulate import scenario as scenarios
    from rollart.simulate import sweep as sweeps
    from rollart.simulate.simulation import simulate as run

    asked = []
    for point in sweeps.points(sweep):
        loaded = scenarios.load(scenario, [*overrides, *point.overrides], workload)
        name = point.preset or preset
        asked.append((point, loaded.with_preset(name) if name else loaded))
    swept = []
    with Console(stderr=True).status("") as status:
        for point, each in asked:
            status.update(" ".join(point.values.values())[:100])
            first = each.seed if seed is None else seed
            swept.append((point, [run(each, seed=first + number) for number in range(seeds)]))
    console = Console(stderr=as_json, highlight=False)
    console.print(sweeps.table(swept))
    console.print(sweeps.LEGEND, style="dim")
    if as_json:
        typer.echo(json.dumps({"sweep": sweeps.as_rows(swept)}))
