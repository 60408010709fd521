"""`rollart reproduce`: published figures against simulated ones."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from rollart.app.commands.common import AsJson, guarded, print_json, say

if TYPE_CHECKING:
    from rollart.simulator.paper import PaperRow


@guarded
def reproduce(
    what: Annotated[Literal["paper"], typer.Argument(metavar="paper", help="The RollArt paper.")],
    scenarios: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The scenarios; default: examples/paper of this source tree.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The picture.")] = Path("paper.png"),
    as_json: AsJson = False,
) -> None:
    """Simulate the scenarios of the RollArt paper, and compare with its figures.

    Prints published value, simulated value and error.

    One set of constants for all of them. Takes a few minutes.

    [dim]rollart reproduce paper
    rollart reproduce paper --json[/dim]
    """
    from rollart.simulator import paper, plots

    console = Console(stderr=as_json, highlight=False)
    with console.status("") as status:
        runs = paper.PaperScenarios(scenarios or paper.FOLDER, lambda name: status.update(name[:100]))
        rows = list(paper.reproduce(runs))
    console.print(_table(rows))
    summary = _summary(rows)
    missed = [row for row in rows if not row.close]
    compared, seconds = len(summary["rows"]), summary["seconds"]
    console.print(
        f"{summary['within_15']} of {compared} comparisons within {paper.CLOSE:.0%}; "
        f"{summary['missed_with_reason']} others with a reason"
    )
    console.print(f"{seconds['within_15']} of {len(seconds['rows'])} seconds of steps within {paper.CLOSE:.0%}")
    fit = paper.stored_fit(runs.folder)
    if fit["command"]:
        console.print(
            f"{fit['cross_validated_within_15']:.0%} of figures are within {paper.CLOSE:.0%} if the parameters are "
            f"fitted without their table; not pinned down: {', '.join(fit['not_pinned_down'])}",
            soft_wrap=True,
        )
    for reason in dict.fromkeys(row.reason for row in missed if row.reason):
        console.print(f"- {reason}", style="dim", soft_wrap=True)
    plots.figures(rows, output)
    say(console, f"picture: {output}")
    if as_json:
        cross_validated = {"cross_validated_within_15": fit.pop("cross_validated_within_15")}
        print_json(summary | cross_validated | {"fit": fit})


def _table(rows: "list[PaperRow]") -> Table:
    numbers = (Column(name, justify="right") for name in ("published", "simulated", "error"))
    table = Table("figure", "what", *numbers, "", box=None, pad_edge=False, header_style="dim")
    for row in rows:
        verdict = "" if row.close else "reason below" if row.reason else "missed"
        style = "" if row.close else "yellow" if row.reason else "red"
        values = (f"{row.published:.3g}", f"{row.simulated:.3g}", f"{row.error:+.0%}")
        table.add_row(row.figure, row.what, *values, verdict, style=style)
    return table


def _summary(rows: "list[PaperRow]") -> dict[str, Any]:
    """What the paper compares, and `seconds` of single steps."""
    compared = [row for row in rows if not row.absolute]
    return _counts(compared) | {"seconds": _counts([row for row in rows if row.absolute])}


def _counts(rows: "list[PaperRow]") -> dict[str, Any]:
    return {
        "within_15": sum(row.close for row in rows),
        "missed_with_reason": sum(not row.close and bool(row.reason) for row in rows),
        "missed": sum(not row.close and not row.reason for row in rows),
        "rows": [asdict(row) | {"error": row.error, "reason": "" if row.close else row.reason} for row in rows],
    }
