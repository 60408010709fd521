"""`rollart reproduce`: published figures against simulated ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from rollart.app.commands.common import AsJson, guarded, print_json, say

if TYPE_CHECKING:
    from rollart.simulate.paper import PaperRow


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
    from rollart.simulate import paper

    console = Console(stderr=as_json, highlight=False)
    folder = scenarios or paper.FOLDER
    with console.status("") as status:
        rows = list(paper.reproduce(paper.PaperScenarios(folder, lambda name: status.update(name[:100]))))
    console.print(_table(rows))
    missed = [row for row in rows if not row.close]
    explained = sum(bool(row.reason) for row in missed)
    console.print(
        f"{len(rows) - len(missed)} of {len(rows)} within {paper.CLOSE:.0%}; {explained} others with a reason"
    )
    for reason in dict.fromkeys(row.reason for row in missed if row.reason):
        console.print(f"- {reason}", style="dim", soft_wrap=True)
    _draw(rows, output)
    say(console, f"picture: {output}")
    if as_json:
        print_json(_summary(rows))


def _table(rows: "list[PaperRow]") -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("figure", "what"):
        table.add_column(column)
    for column in ("published", "simulated", "error"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        verdict = "" if row.close else "reason below" if row.reason else "missed"
        style = "" if row.close else "yellow" if row.reason else "red"
        table.add_row(
            row.figure,
            row.what,
            f"{row.published:.3g}",
            f"{row.simulated:.3g}",
            f"{row.error:+.0%}",
            verdict,
            style=style,
        )
    return table


def _summary(rows: "list[PaperRow]") -> dict[str, Any]:
    return {
        "within_15_percent": sum(row.close for row in rows),
        "missed_with_reason": sum(not row.close and bool(row.reason) for row in rows),
        "missed": sum(not row.close and not row.reason for row in rows),
        "rows": [
            {
                "figure": row.figure,
                "what": row.what,
                "published": row.published,
                "simulated": row.simulated,
                "error": row.error,
                "reason": row.reason if not row.close else "",
            }
            for row in rows
        ],
    }


def _draw(rows: "list[PaperRow]", path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 7), layout="constrained")
    low = min(min(row.published, row.simulated) for row in rows if row.simulated > 0) / 2
    high = max(max(row.published, row.simulated) for row in rows) * 2
    axes.plot([low, high], [low, high], color="grey", linewidth=0.8)
    axes.fill_between([low, high], [0.85 * low, 0.85 * high], [1.15 * low, 1.15 * high], color="grey", alpha=0.2)
    for name in dict.fromkeys(row.figure for row in rows):
        of = [row for row in rows if row.figure == name and row.simulated > 0]
        axes.scatter([row.published for row in of], [row.simulated for row in of], label=name, s=18)
    axes.set(xscale="log", yscale="log", xlabel="published", ylabel="simulated", title="The band is 15%")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
