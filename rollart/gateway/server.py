"""The gateway's listener: an application on a port of its own, for as long as a block lasts."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollart.core.errors import ServiceError
from rollart.gateway.http import Application, Connection

BACKLOG = 2048
END_S = 2.0  # for answers that are under way at the end


@asynccontextmanager
async def served(app: Application, host: str, port: int = 0) -> AsyncIterator[str]:
    """Its address. Raises ServiceError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ServiceError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port") from error
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(app, connections), sock=listener, backlog=BACKLOG)
    address, number = listener.getsockname()[:2]
    try:
        yield f"http://[{address}]:{number}" if family == socket.AF_INET6 else f"http://{address}:{number}"
    finally:
        server.close()
        await _ended(connections)


async def _ended(connections: set[Connection]) -> None:
    """Each after the answer that is under way, if that does not take long."""
    under_way = [connection.task for connection in connections if connection.task is not None]
    for connection in list(connections):
        connection.shut()
    if under_way:
        _, late = await asyncio.wait(under_way, timeout=END_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
    for connection in list(connections):
        connection.abort()
