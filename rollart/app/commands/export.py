"""`rollart export`: from a checkpoint to a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from rollart.app.commands.common import guarded
from rollart.core.errors import RollartError


@guarded
def export(
    source: Annotated[Path, typer.Argument(metavar="CHECKPOINT|RUN_DIR", help="A checkpoint, or a run that has one.")],
    output: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    best: Annotated[
        bool, typer.Option("--best", help="The run's best checkpoint by evaluation, not its newest.")
    ] = False,
    dtype: Annotated[str, typer.Option(metavar="float32|bfloat16|float16", help="The number format.")] = "float32",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the adapter, as peft writes it, of a run with training.lora.")
    ] = False,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the model of an adapter is now, if it was moved.")
    ] = None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face folder, with its tokenizer.

    Tensors have the names that transformers, vLLM and others expect on disk.
    Needs the memory of one decoder layer and a file of 2 GB, whatever the model.
    Adapters (training.lora) are merged into the weights of their model, or
    written alone with --adapter. A folder with an adapter is merged likewise.

    [dim]rollart export runs/quickstart-1 models/mine
    rollart export runs/quickstart-1/checkpoints/000020 models/mine --dtype bfloat16
    rollart export runs/smollm2-lora-1 adapters/mine --adapter[/dim]
    """
    if dtype not in ("float32", "bfloat16", "float16"):
        raise RollartError(f"--dtype is float32, bfloat16 or float16, not {dtype}")
    if output.exists() and any(output.iterdir()):
        raise RollartError(f"{output} is not empty; choose another folder")
    from rollart.fleet.checkpoints import find_checkpoint
    from rollart.models.folder import is_adapter
    from rollart.training.export import export_adapter, export_model

    checkpoint = source if is_adapter(source) else find_checkpoint(source, best=best)
    if adapter:
        export_adapter(checkpoint, output, dtype)
    else:
        export_model(checkpoint, output, dtype, base=base)
    typer.echo(f"{checkpoint} is exported to {output}")
