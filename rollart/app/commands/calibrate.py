"""`rollart calibrate`: from a real run to a scenario that predicts others."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from rollart.app.commands.common import guarded

if TYPE_CHECKING:
    from rollart.simulator.calibration import Calibration


@guarded
def calibrate(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run that has trained.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The scenario to write.")] = Path(
        "workload.yaml"
    ),
    run_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run file, if it is not in the folder.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The picture, as PNG; default: next to the scenario.")
    ] = None,
) -> None:
    """Fit the simulator's models to a real run, from its event log.

    Writes the run file with a `simulate` section: the distributions of turns,
    answers, resets, steps and rewards, and the speed of engines and trainer.
    Draws the fits against the data.

    [dim]rollart calibrate runs/quickstart-1 -o workload.yaml
    rollart simulate workload.yaml --set rollout.alpha=2[/dim]
    """
    from rollart.simulator import plots
    from rollart.simulator.calibration import calibrate as fitted

    calibration = fitted(run_dir, run_file)
    picture = plot or output.with_suffix(".png")
    output.write_text(calibration.text(), encoding="utf-8")
    plots.fits(calibration, picture)
    console = Console(highlight=False)
    console.print(_table(calibration))
    for warning in calibration.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)
    console.print(f"scenario: {output}\npicture:  {picture}", soft_wrap=True, markup=False)


def _table(calibration: "Calibration") -> Table:
    from rollart.simulator.calibration import describe
    from rollart.simulator.fit import distance

    measured, distances = Column("measured", justify="right"), Column("distance", justify="right")
    table = Table("", "", measured, "fit", distances, box=None, pad_edge=False, header_style="dim")
    for task in calibration.measurements.tasks:
        for key, (data, fitted) in calibration.fits(task).items():
            table.add_row(task, key, str(len(data)), describe(fitted), f"{distance(fitted, data):.3f}")
    section = calibration.scenario.simulate
    for pool, engine in calibration.engines.items():
        pace = f"{engine.pace.fixed * 1e3:.3g} ms a pass, {engine.pace.token * 1e6:.3g} us a token"
        if engine.pace.context:
            pace += f", {engine.pace.context * 1e9:.3g} ns a token of KV"
        table.add_row(pool, "pass", str(len(engine.seconds)), pace)
    if section.train is not None:
        pace = f"{section.train.fixed * 1e3:.3g} ms a step, {section.train.token * 1e6:.3g} us a token"
        table.add_row("trainer", "step", str(len(calibration.measurements.trainings)), pace)
    table.add_row("", "contention", "", f"{section.contention:.0%} longer while engines and trainer both work")
    return table
