"""`rollart plan`: which hardware for a workload, and how to use it."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from rollart.app.commands.common import AsJson, Overrides, ScenarioPath, guarded, print_json, say
from rollart.app.commands.simulate import print_assumptions
from rollart.core.errors import ConfigError

if TYPE_CHECKING:
    from rollart.simulator.planner import PlanResult, PlanSearch
    from rollart.simulator.scenario import Scenario


@guarded
def plan(
    scenario: ScenarioPath,
    budget: Annotated[
        float | None, typer.Option(help="Price of all devices per hour, one H20 is 1; default: that of its pools.")
    ] = None,
    overrides: Overrides = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="CLASS", help="Generate on this class; repeatable. Default: those of its pools."),
    ] = None,
    max_devices: Annotated[
        list[str] | None, typer.Option("--max", metavar="CLASS=N", help="Use at most N devices of this class.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure after the warmup.")] = 4,
    per_level: Annotated[int, typer.Option(min=1, help="Splits to simulate at each level of spending.")] = 3,
    seeds: Annotated[
        int, typer.Option(min=1, help="Simulations of the best plans, with other seeds and constants.")
    ] = 3,
    workers: Annotated[int | None, typer.Option(min=1, help="Parallel simulations; default: one per core.")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the recommended plan as a scenario.")
    ] = None,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="The picture, as PNG.")] = Path("plan.png"),
    as_json: AsJson = False,
) -> None:
    """Search for the best use of a budget, by simulation.

    Divides it between training and generation and between device classes,
    then tries alpha, redundancy, group shapes, environment processes, and pairs
    of prefill and decode. Prints the plans that no other beats in price and time.

    [dim]rollart plan examples/paper/end_to_end.yaml
    rollart plan workload.yaml --budget 300 --device H800 --device H20 --max H20=32[/dim]
    """
    from rollart.app import api
    from rollart.simulator.planner import search

    loaded = api.load_scenario(scenario, overrides or [])
    console = Console(stderr=as_json, highlight=False)
    assumed = print_assumptions(loaded, console)
    found = search(
        loaded,
        budget,
        kinds=device or (),
        max_devices=dict(_limit(text) for text in max_devices or ()),
        steps=steps,
        per_level=per_level,
        seeds=seeds,
        workers=workers,
        on_progress=lambda text: console.print(text, style="dim", markup=False),
    )
    _print(found, loaded, console, output, plot)
    if as_json:
        print_json(_summary(found) | {"assumed": assumed})


def _print(found: "PlanSearch", scenario: "Scenario", console: Console, output: Path | None, plot: Path) -> None:
    import yaml

    from rollart.config.yaml_tree import Dumper
    from rollart.simulator import plots
    from rollart.simulator.planner import explanation
    from rollart.simulator.plans import applied, as_values

    console.print(_table(found))
    console.print(explanation(found), markup=False)
    plots.plans(found, plot)
    say(console, f"picture: {plot}")
    if output is not None:
        values = as_values(applied(found.recommended.plan, scenario))
        text = yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
        output.write_text(text, encoding="utf-8")
        say(console, f"scenario of the recommended plan: {output}")


def _limit(text: str) -> tuple[str, int]:
    kind, _, count = text.partition("=")
    if not count.isdigit():
        raise ConfigError(f"--max {text}: write it as CLASS=N, for instance H20=32")
    return kind, int(count)


def _table(found: "PlanSearch") -> Table:
    from rollart.simulator.planner import reason

    title = f"{found.considered} splits considered, {len(found.tried)} plans simulated; no other plan beats these"
    columns = [Column(name, justify="right", no_wrap=True) for name in ("price/h", "s/step", "price/step")]
    table = Table(*columns, "plan", "why", title=title, title_justify="left", box=None, pad_edge=False)
    table.header_style, table.padding = "dim", (0, 2, 0, 0)
    rows = found.front
    if found.given is not None and found.given not in rows:
        rows = [*rows, found.given]
    for each in rows:
        why = ("as given: " if each is found.given else "") + reason(each, found.given)
        within = "" if math.isnan(each.half_s) else f" +- {each.half_s:.2g}"
        numbers = (f"{each.price:.4g}", f"{each.step_s:.4g}{within}", f"{each.cost_per_step:.3g}")
        table.add_row(*numbers, each.plan.split, why)
    return table


def _summary(found: "PlanSearch") -> dict[str, Any]:
    from rollart.simulator.planner import reason

    def described(each: "PlanResult") -> dict[str, Any]:
        plan = asdict(each.plan) | {"split": each.plan.split}
        numbers = {"price_per_hour": each.price, "step_s": each.step_s, "cost_per_step": each.cost_per_step}
        numbers |= {} if math.isnan(each.half_s) else {"interval": each.half_s}
        numbers["sure_gain"] = found.sure_gain(each)
        return {**numbers, "plan": plan, "reason": reason(each, found.given)}

    return {
        "budget": found.budget,
        "considered": found.considered,
        "simulated": len(found.tried),
        "given": described(found.given) if found.given else None,
        "fastest": described(found.fastest),
        "recommended": described(found.recommended),
        "tied": [described(each) for each in found.tied],
        "front": [described(each) for each in found.front],
        "failed": found.failed,
    }
