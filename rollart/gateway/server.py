"""The gateway's listener: an ASGI application on a port of its own, for as long as a block lasts."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import uvicorn

from rollart.errors import ServiceError

BACKLOG = 2048
END_S = 2


class _Server(uvicorn.Server):
    """Without uvicorn's own signal handling: whoever opened the block ends it."""

    def capture_signals(self) -> Any:
        return nullcontext()


@asynccontextmanager
async def served(app: Any, host: str, port: int = 0) -> AsyncIterator[str]:
    """Its address. Raises ServiceError if it cannot listen there."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ServiceError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port") from error
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # paths may hold keys
        lifespan="off",
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=END_S,
        backlog=BACKLOG,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    address, number = listener.getsockname()[:2]
    try:
        yield f"http://{address}:{number}"
    finally:
        server.should_exit = True
        await serving
