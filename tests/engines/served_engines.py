"""Engines of this process behind real sockets, so that they can reach each other."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from tiny_decoders import twin

from rollart.config import EngineConfig
from rollart.engines.torch.engine import TorchEngine
from rollart.engines.torch.model import EngineModel
from rollart.launch.rpc import Handler, application


class _Server(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """Signals are pytest's."""


@asynccontextmanager
async def served(handlers: Mapping[str, Handler], port: int = 0) -> AsyncIterator[str]:
    """The address at which they answer."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(
        application(handlers), log_level="warning", lifespan="off", ws_ping_interval=None, timeout_graceful_shutdown=1
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await serving


@asynccontextmanager
async def peer(network: Any, store: Any = None, **config: Any) -> AsyncIterator[tuple[TorchEngine, str]]:
    """An engine, and where others find its KV."""
    async with TorchEngine(EngineModel(twin(network)), EngineConfig(**config), store=store) as engine:
        handlers: dict[str, Handler] = {"offer": engine.kv_server.offer, "more": engine.kv_server.more}
        async with served(handlers) as url:
            yield engine, url
