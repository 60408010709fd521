"""The placement of a run as a table."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollart.observe.tables import table
from rollart.placement import Placement


def placed(plan: Placement) -> RenderableType:
    parts: list[RenderableType] = [Text("Processes", style="bold"), _processes(plan), Text(), _batch(plan)]
    if plan.warning:
        parts.append(Text(f"! {plan.warning}", style="yellow"))
    return Group(*parts)


def _processes(plan: Placement) -> Table:
    rows = table("role", "name", "processes", "threads", "device", "about")
    for place in plan.places:
        number = f"up to {place.processes}" if place.elastic else str(place.processes)
        rows.add_row(place.role, place.name, number, str(place.threads), place.device, place.about)
    return rows


def _batch(plan: Placement) -> Text:
    groups = ", ".join(f"{number} groups of {task}" for task, number in plan.batch.items())
    total = sum(plan.batch.values()) * plan.group_size
    first = f"First batch: {groups}; {plan.group_size} trajectories each, {total} in all."
    return Text(f"{first} At most {plan.in_flight} trajectories in the pipeline. {plan.cores} cores here.")
