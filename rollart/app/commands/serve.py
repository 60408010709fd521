"""`rollart serve`: a saved model behind the gateway, for any client."""

import asyncio
import os
import secrets
import signal
from pathlib import Path
from typing import Annotated

import typer

from rollart.app.commands.common import ModelDir, guarded
from rollart.core.errors import RollartError
from rollart.models.folder import is_adapter, model_problem

KEY = "ROLLART_API_KEY"


@guarded
def serve(
    model: ModelDir,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; default: that of the folder.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the engine.")] = 1,
    dtype: Annotated[
        str, typer.Option(metavar="float32|bfloat16", help="The number format of the engine.")
    ] = "float32",
) -> None:
    """Serve a saved model over the OpenAI and Anthropic APIs.

    Prints the base URLs and the API key, which is ROLLART_API_KEY or a random
    one. Stop it with Ctrl-C.

    [dim]rollart serve --model runs/quickstart-1/model
    rollart serve --model models/smollm2 --port 0 --name smollm2[/dim]
    """
    if (problem := model_problem(model)) and not is_adapter(model):
        raise RollartError(f"--model {model} {problem}")
    if dtype not in ("float32", "bfloat16"):
        raise RollartError(f"--dtype is float32 or bfloat16, not {dtype}")
    key = os.environ.get(KEY) or f"sk-{secrets.token_urlsafe(24)}"
    asyncio.run(
        _serve(
            model=model, name=name or model.absolute().name, key=key, host=host, port=port, threads=threads, dtype=dtype
        )
    )


async def _serve(model: Path, name: str, key: str, host: str, port: int, threads: int, dtype: str) -> None:
    from rollart.config import EngineConfig
    from rollart.gateway.limits import GatewayLimits
    from rollart.gateway.model_server import serve_model
    from rollart.training.client import model_folder

    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    config = EngineConfig.model_validate({"threads": threads, "dtype": dtype})
    async with (
        model_folder(model) as folder,
        serve_model(folder, name=name, key=key, host=host, port=port, config=config, limits=GatewayLimits()) as saved,
    ):
        typer.echo(f"model        {name}")
        typer.echo(f"OpenAI       {saved.endpoint.base_url}")
        typer.echo(f"Anthropic    {saved.endpoint.anthropic_base_url}")
        typer.echo(f"key          {key if os.environ.get(KEY) != key else f'the one in {KEY}'}")
        typer.echo("Stop it with Ctrl-C.")
        await saved.wait()
