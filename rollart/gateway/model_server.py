"""`rollart serve`: the gateway for a saved model, with one engine in a child process, one key and no training."""

import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.config import EngineConfig
from rollart.config.hardware import DEFAULT_ENGINE
from rollart.core.endpoint import Endpoint
from rollart.core.errors import ServiceError
from rollart.core.protocols import Generate, TokenStream
from rollart.core.types import Completion, GenerationRequest, Sampling
from rollart.engines.backends import BACKENDS, alone
from rollart.engines.client import EngineClient
from rollart.gateway.app import App
from rollart.gateway.http import listening
from rollart.gateway.limits import EpisodeLimits, GatewayLimits
from rollart.gateway.session import SessionTable
from rollart.gateway.template import ChatTemplate
from rollart.hardware.gpus import gpus
from rollart.launch import rpc
from rollart.launch.launcher import ResourceRequest, ServiceHandle, service_command
from rollart.launch.local import LocalLauncher

MAX_PARALLEL = 1024


@dataclass(frozen=True, slots=True)
class ModelServer:
    """`wait` raises ServiceError once the engine has ended."""

    endpoint: Endpoint
    engine: ServiceHandle

    async def wait(self) -> None:
        raise ServiceError(f"the engine ended: {await self.engine.wait()}")


@asynccontextmanager
async def serve_model(
    model: Path, *, name: str, key: str, host: str, port: int, config: EngineConfig, limits: GatewayLimits
) -> AsyncIterator[ModelServer]:
    """Raises ServiceError if the engine or the HTTP server cannot start."""
    config = alone(config, model)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-serve-")))
        launcher, classes = LocalLauncher(), (*dict.fromkeys(gpus()), "cpu")
        stack.push_async_callback(launcher.close)
        spec: dict[str, Any] = {"model": str(model.absolute()), "weights": str(folder / "weights")}
        spec |= {"seed": 0, "version": 0, "config": config.model_dump(mode="json"), "classes": classes}
        command = service_command(
            BACKENDS[DEFAULT_ENGINE].module, spec, name="engine", logs=folder, threads=config.thread_count
        )
        engine = await launcher.launch(command, ResourceRequest(classes))
        client = await stack.enter_async_context(rpc.connected(str(engine.answer["url"]), key=launcher.key))
        own = EngineClient(client, deadline=limits.response_s)

        def generate(request: GenerationRequest, stream: TokenStream | None = None, /) -> Awaitable[Completion]:
            if stream is None:
                return own.generate(request)
            return own.generate_in_parts(request, stream.every, lambda part: stream.on_tokens(part.tokens))

        front = model_front(model, generate, name=name, key=key, host=host, port=port, limits=limits)
        yield ModelServer(await stack.enter_async_context(front), engine)


@asynccontextmanager
async def model_front(
    model: Path, generate: Generate, *, name: str, key: str, host: str, port: int, limits: GatewayLimits
) -> AsyncIterator[Endpoint]:
    """The APIs of a saved model, whose completions come from `generate`."""
    template = ChatTemplate(model)
    sessions = SessionTable(template, generate)
    sessions.open(key, _limits(model))
    async with listening(App(template, sessions, limits, name, any_model=False), host, port) as url:
        yield Endpoint(url, key, name)


def _limits(model: Path) -> EpisodeLimits:
    """Defaults from the model's own settings; clients may change them."""
    about, defaults = _json(model / "config.json"), _json(model / "generation_config.json")
    context = int(about.get("max_position_embeddings") or 4096)
    sampling = Sampling(
        temperature=defaults.get("temperature") or 1.0,
        top_p=defaults.get("top_p") or 1.0,
        top_k=defaults.get("top_k") or 0,
        max_tokens=context,
    )
    return EpisodeLimits(
        "serve", "serve", secrets.randbits(31), sampling, context, max_parallel=MAX_PARALLEL, fixed=False, record=False
    )


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}
