"""A client without a network: bytes to a connection object and back. It can leave in the middle of an answer."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from rollart.gateway.app import App
from rollart.gateway.http import Connection, OpenConnections


class Left(Exception):
    """The client left before it had everything."""


class Wire(asyncio.Transport):
    """The other end of a connection. `full`: what is written is not taken."""

    def __init__(self, connection: Connection, leave_after: int | None = None) -> None:
        super().__init__()
        self.connection, self.leave_after = connection, leave_after
        self.received, self.writes = b"", 0
        self.closed = False
        self.ended = asyncio.Event()
        connection.connection_made(self)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def write(self, data: Any) -> None:
        self.received += bytes(data)
        self.writes += 1
        if self.leave_after is not None and self.writes >= self.leave_after:
            self.leave()

    def leave(self) -> None:
        """As a socket would, the server notices a little later."""
        asyncio.get_running_loop().call_soon(self.close)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.connection.connection_lost(None)
            self.ended.set()

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self.closed


async def post(
    app: App, path: str, body: Mapping[str, Any], key: str, *, leave_after: int | None = None
) -> tuple[int, Any]:
    """Status and JSON, or the list of streamed events. `leave_after` so many writes of the answer; 0: before it."""
    wire = Wire(Connection(app, OpenConnections()), leave_after or None)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nauthorization: Bearer {key}\r\ncontent-length: {len(data)}\r\n\r\n"
    wire.send(head.encode() + data)
    if leave_after == 0:
        wire.leave()
    task = wire.connection.task
    if task is not None:
        await asyncio.wait([task])
        if task.cancelled():
            raise Left
    wire.close()
    status, headers, whole = parsed(wire.received)
    if b"text/event-stream" in headers[b"content-type"]:
        return status, [json.loads(line[6:]) for line in whole.decode().splitlines() if line.startswith("data: {")]
    return status, json.loads(whole)


def parsed(received: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Status, headers and body of one answer."""
    head, _, rest = received.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name: value for name, _, value in (line.partition(b": ") for line in lines)}
    if headers.get(b"transfer-encoding") != b"chunked":
        return int(first.split()[1]), headers, rest
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return int(first.split()[1]), headers, body
