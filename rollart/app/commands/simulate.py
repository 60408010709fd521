"""`rollart simulate`: a scenario on virtual time."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rollart.app.commands.common import AsJson, Overrides, ScenarioPath, guarded, print_json, say

_DRAWS, _MAX_EVENTS = 4, 1_000_000  # about half a minute: what takes longer is repeated only when asked to

if TYPE_CHECKING:
    from rollart.simulator.scenario import Scenario


@guarded
def simulate(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    preset: Annotated[str | None, typer.Option(help="sync, sync_plus, one_off, start_bound or rollart.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="One row per value; KEY,KEY=A:B,C:D changes keys together; repeatable, for all combinations.",
        ),
    ] = None,
    workload: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Override the `simulate` section with this file.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The first seed; default: the scenario's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, one simulation each.")] = 1,
    draws: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Simulations with other seeds and constants, for the 95% interval. "
            f"Default: {_DRAWS}, or 0 where one takes long.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Create the run folder in DIR instead of `output`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict step time, throughput, idle times and cost of a run, without its hardware.

    The scheduler of real runs drives modelled engines, environments,
    rewards and training on a virtual clock. The event log goes into a run
    folder, so `rollart show` and `rollart timeline` work on it. A sweep makes
    no run folders.

    [dim]rollart simulate examples/paper/end_to_end.yaml
    rollart simulate examples/paper/end_to_end.yaml --preset sync_plus --seeds 3
    rollart simulate examples/paper/end_to_end.yaml --sweep rollout.alpha=0,1,2,3[/dim]
    """
    from rollart.app import api

    console = Console(stderr=as_json, highlight=False)

    def load(more: list[str], other_preset: str | None = None) -> "Scenario":
        chosen = other_preset or preset
        return api.load_scenario(scenario, [*(overrides or []), *more], preset=chosen, workload=workload)

    if sweep:
        rows = _sweep(sweep, load, console, seed, seeds)
        if as_json:
            print_json({"sweep": rows})
        return
    _simulate(load([]), console, (seed, seeds, draws), output, as_json)


def _simulate(
    scenario: "Scenario",
    console: Console,
    simulations: tuple[int | None, int, int | None],
    output: Path | None,
    as_json: bool,
) -> None:
    """`simulations`: the first seed, the number of seeds, and of draws."""
    from rollart.app import api
    from rollart.core import run_folder
    from rollart.simulator.assumptions import device_memory
    from rollart.simulator.report import report, summary

    folder = run_folder.create(output or scenario.output, scenario.name) if scenario.simulate.log == "full" else None
    assumed = print_assumptions(scenario, console)
    with Console(stderr=True).status("simulating") as status:

        def update(step: int, seconds: float) -> None:
            status.update(f"step {step} of {scenario.training.steps}, {seconds:,.0f} s simulated")

        seed, seeds, draws = simulations
        results = api.simulate(scenario, seed=seed, seeds=seeds, folder=folder, on_progress=update)
        if draws is None:
            draws = _DRAWS if results[0].events <= _MAX_EVENTS else 0
        after = results[-1].seed + 1
        drawn = api.simulate(scenario, seed=after, seeds=draws, uncertain=True, on_progress=update) if draws else []
    console.print(report(results, drawn))
    memory = device_memory(scenario)
    if memory:
        each = ", ".join(f"{pool} {used:.3g} of {device.memory:g}" for pool, (used, device) in memory.items())
        say(console, f"memory    GB of each device: {each}")
    console.print(_how_certain(draws), style="dim")
    if folder is not None:
        say(console, f"run folder: {folder}")
    if as_json:
        more = {
            "assumed": assumed,
            "memory": {pool: used for pool, (used, _) in memory.items()},
            "folder": str(folder) if folder else None,
        }
        print_json(summary(results, drawn) | more)


def _how_certain(draws: int) -> str:
    from rollart.simulator.constants import UNCERTAINTY

    if not draws:
        return "no interval: that takes simulations with other seeds and constants, for instance --draws 4"
    return f"95%: over {draws} simulations with other seeds and constants ({', '.join(UNCERTAINTY)})"


def print_assumptions(scenario: "Scenario", console: Console) -> list[str]:
    """What the scenario leaves open, and a warning if its trainer does not fit."""
    from rollart.simulator.assumptions import assumptions, too_little_memory

    assumed = [str(each) for each in assumptions(scenario)]
    console.print("assumed; `rollart calibrate` fits them to a real run:", style="dim")
    for line in assumed:
        console.print(f"  {line}", style="dim", markup=False)
    if problem := too_little_memory(scenario):
        console.print(problem, style="yellow", markup=False)
    return assumed


def _sweep(
    sweep: list[str],
    load: "Callable[[list[str], str | None], Scenario]",
    console: Console,
    seed: int | None,
    seeds: int,
) -> list[dict[str, Any]]:
    """Every point is checked before the first is simulated."""
    from rollart.app import api
    from rollart.simulator import sweep as sweeps

    scenarios = [(point, load(point.overrides, point.preset)) for point in sweeps.points(sweep)]
    swept = []
    with Console(stderr=True).status("") as status:
        for point, scenario in scenarios:
            status.update(" ".join(point.values.values())[:100])
            swept.append((point, api.simulate(scenario, seed=seed, seeds=seeds)))
    console.print(sweeps.table(swept))
    console.print(sweeps.LEGEND, style="dim")
    return sweeps.as_rows(swept)
