"""`rollart launch`: what starts a run on SLURM, on Kubernetes or on a Ray cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollart.app.commands.common import Overrides, RunPath, guarded, say

if TYPE_CHECKING:
    from rollart.app.manifests import LaunchedRun

app = typer.Typer(
    no_args_is_help=True,
    help="Write what starts a run on a cluster, from the pools of its run file. Starts nothing.",
)
Gpus = Annotated[int, typer.Option(min=1, help="GPUs of a node.")]
Cpus = Annotated[int, typer.Option(min=1, help="CPUs of a node.")]
Target = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to FILE, not to stdout.")]


@app.command()
@guarded
def slurm(
    run_file: RunPath,
    overrides: Overrides = None,
    gpus_per_node: Gpus = 8,
    hours: Annotated[float, typer.Option(min=0.1, help="Time limit; a requeued job continues the run.")] = 24.0,
    partition: Annotated[str | None, typer.Option(help="The partition.")] = None,
    output: Target = None,
) -> None:
    """A batch script: one Ray node on each node of the job, then `rollart train`.

    Several device classes make a heterogeneous job. Never exercised on SLURM itself.

    [dim]rollart launch slurm examples/scale/qwen3-32b.yaml -o job.sh && sbatch job.sh[/dim]
    """
    from rollart.app import manifests

    launched = _launched(run_file, overrides)
    groups = manifests.node_groups(launched.run, manifests.NodeShape(gpus=gpus_per_node))
    _write(manifests.slurm(launched, groups, hours=hours, partition=partition), output)


@app.command()
@guarded
def kubernetes(
    run_file: RunPath,
    image: Annotated[str, typer.Option(help="A container image with rollart, Ray and the files that the run names.")],
    claim: Annotated[str, typer.Option(help="The persistent volume claim for run folders.")],
    overrides: Overrides = None,
    gpus_per_node: Gpus = 8,
    cpus_per_node: Cpus = 64,
    memory: Annotated[int, typer.Option(min=1, help="Memory of a node, GB.")] = 256,
    output: Target = None,
) -> None:
    """A RayJob of KubeRay, and a ConfigMap with the run file.

    Nodes are chosen by their label rollart.io/device. Files that the run names must
    be in the image; the first line lists them. Never exercised on a cluster.

    [dim]rollart launch kubernetes run.yaml --image registry/rollart --claim runs -o job.yaml[/dim]
    """
    from rollart.app import manifests

    launched = _launched(run_file, overrides)
    shape = manifests.NodeShape(gpus_per_node, cpus_per_node, memory)
    groups = manifests.node_groups(launched.run, shape)
    _write(manifests.kubernetes(launched, groups, shape=shape, image=image, claim=claim), output)


@app.command()
@guarded
def ray(
    run_file: RunPath,
    overrides: Overrides = None,
    address: Annotated[str, typer.Option(help="The dashboard of the Ray cluster.")] = "http://127.0.0.1:8265",
) -> None:
    """The command that submits the run as a job to a Ray cluster.

    The current folder goes with it, so environments and data files in it are found.

    [dim]$(rollart launch ray run.yaml --address http://head:8265)[/dim]
    """
    from rollart.app import manifests

    _write(manifests.ray_job(_launched(run_file, overrides), address) + "\n", None)


def _launched(run_file: Path, overrides: list[str] | None) -> "LaunchedRun":
    from rollart.app.manifests import LaunchedRun
    from rollart.config import loading

    return LaunchedRun(loading.load(run_file, overrides or []), run_file, tuple(overrides or ()))


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    from rich.console import Console

    say(Console(stderr=True), f"wrote {output}")
