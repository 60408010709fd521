"""The gateway for a saved model: one engine in a child process, one key, no training."""

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
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest, Sampling
from rollart.engines.backends import BACKENDS
from rollart.engines.client import EngineClient
from rollart.gateway.app import App
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.messages import EpisodeLimits
from rollart.gateway.server import served
from rollart.gateway.template import ChatTemplate
from rollart.gateway.tenants import Tenants
from rollart.hardware.gpus import gpus
from rollart.launch import rpc
from rollart.launch.launcher import ResourceRequest, ServiceHandle, service_command
from rollart.launch.local import LocalLauncher

PARALLEL = 1024


@dataclass(frozen=True, slots=True)
class Saved:
    """A model that is being served. `wait` raises ServiceError once its engine has ended."""

    endpoint: Endpoint
    engine: ServiceHandle

    async def wait(self) -> None:
        raise ServiceError(f"the engine ended: {await self.engine.wait()}")


@asynccontextmanager
async def serving(
    model: Path, *, name: str, key: str, host: str, port: int, config: EngineConfig, limits: GatewayLimits
) -> AsyncIterator[Saved]:
    """Raises ServiceError if the engine or the listener cannot start."""
    template = ChatTemplate(model)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollart-serve-")))
        launcher, classes = LocalLauncher(), (*dict.fromkeys(gpus()), "cpu")
        stack.push_async_callback(launcher.close)
        spec: dict[str, Any] = {"model": str(model.absolute()), "weights": str(folder / "weights")}
        spec |= {"seed": 0, "version": 0, "config": config.model_dump(mode="json"), "classes": classes}
        command = service_command(
            BACKENDS[DEFAULT_ENGINE].module, spec, name="engine", logs=folder, threads=config.threads
        )
        engine = await launcher.launch(command, ResourceRequest(classes))
        client = await stack.enter_async_context(rpc.connected(str(engine.answer["url"]), key=launcher.key))
        own = EngineClient(client, deadline=limits.answer_s)

        def generate(request: GenerationRequest, listener: TokenStream | None = None, /) -> Awaitable[Completion]:
            return own.generate(request) if listener is None else own.stream(request, listener)

        tenants = Tenants(template, generate)
        tenants.open(key, _terms(model))
        app = App(template, tenants, limits, name, any_model=False)
        url = await stack.enter_async_context(served(app, host, port))
        yield Saved(Endpoint(url, key, name), engine)


def _terms(model: Path) -> EpisodeLimits:
    """The model's own settings, where a client asks for no others."""
    about, wishes = _json(model / "config.json"), _json(model / "generation_config.json")
    context = int(about.get("max_position_embeddings") or 4096)
    sampling = Sampling(
        temperature=wishes.get("temperature") or 1.0,
        top_p=wishes.get("top_p") or 1.0,
        top_k=wishes.get("top_k") or 0,
        max_tokens=context,
    )
    return EpisodeLimits(
        "serve", "serve", secrets.randbits(31), sampling, context, parallel=PARALLEL, fixed=False, record=False
    )


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}
