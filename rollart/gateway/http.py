"""A small HTTP/1.1 server: httptools parses, and an `Application` responds.

A web framework around each request costs more CPU than all that the gateway does with it.

The invariants:
- A connection serves one request at a time, in one task, which is cancelled when the client disconnects. A client that
  sends more before it has its response is not read any further: the connection is closed after that response.
- A request is routed when its head is complete: the body of one that will be refused is read and dropped.
- Head and body have a size limit and a timeout, idle connections and the sending of a response a timeout. All bodies
  together have a size limit, too.
- There are at most `connections`; above that, the oldest one that has never shown a key is closed, or the new one.
- What is written is with the operating system, or in a buffer that is small unless the response is one piece; `drained`
  waits for it.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote
from wsgiref.handlers import format_date_time

import httptools

from rollart.core.errors import ServiceError
from rollart.gateway.errors import ApiError, busy, invalid
from rollart.gateway.limits import GatewayLimits

HEAD_BYTES = 64 << 10
BACKLOG = 2048
END_S = 2.0
Headers = Iterable[tuple[bytes, bytes]]
_STATUS = {int(each): b"HTTP/1.1 %d %s\r\n" % (each, each.phrase.encode()) for each in HTTPStatus}


class ClientGone(Exception):
    """The client has disconnected."""


class Application(Protocol):
    limits: GatewayLimits

    def route(self, exchange: "Exchange") -> Any:
        """What `handle` will need. Raises ApiError for a request that is refused whatever its body is."""
        ...

    async def handle(self, exchange: "Exchange") -> None: ...

    def refuse(self, exchange: "Exchange", error: ApiError) -> None:
        """Respond with the error."""
        ...


class Exchange:
    """A request and its response: `respond` once, or `begin`, `write` any number of times, `end`."""

    __slots__ = ("_connection", "begun", "body", "ended", "headers", "known", "method", "path", "route")

    def __init__(self, connection: "Connection", method: str, path: str, headers: dict[bytes, bytes]) -> None:
        self._connection = connection
        self.method, self.path, self.headers = method, path, headers
        self.body = b""
        self.route: Any = None
        self.begun = self.ended = False
        self.known = False  # its key is

    @property
    def ready(self) -> bool:
        """Whether the client has taken most of what was written."""
        return self._connection.writable.is_set()

    def respond(self, status: int, kind: bytes, body: bytes, headers: Headers = ()) -> None:
        self.begun = self.ended = True
        head = _head(status, kind, headers, b"content-length: %d\r\n" % len(body), self._connection.closing)
        self._connection.write(head if self.method == "HEAD" else head + body)

    def begin(self, kind: bytes, headers: Headers = ()) -> None:
        """A chunked response. For a client of HTTP/1.0, the end of the connection is the end of the response."""
        self.begun = True
        connection = self._connection
        framing = b"transfer-encoding: chunked\r\n" if connection.chunks else b""
        connection.write(_head(200, kind, headers, framing, connection.closing))

    def write(self, piece: bytes) -> None:
        self._connection.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self._connection.chunks else piece)

    def end(self) -> None:
        self.ended = True
        if self._connection.chunks:
            self._connection.write(b"0\r\n\r\n")

    async def drained(self) -> None:
        """Wait until all but a little is with the operating system. Raises ClientGone."""
        await self._connection.drained()


class OpenConnections(set["Connection"]):
    """Those of a server. `strangers` never showed a key, the oldest first; `buffered` are the bytes of all bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.strangers: dict[Connection, None] = {}
        self.buffered = 0


class Connection(asyncio.Protocol):
    """`connections` are the open ones of the server."""

    def __init__(self, app: Application, connections: OpenConnections) -> None:
        self._app, self._limits, self._connections = app, app.limits, connections
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.lost = self.closing = False  # closing: after the response that is under way
        self._ignoring = False
        self._held = 0  # bytes of bodies
        self.chunks = True
        self._parser: Any = httptools.HttpRequestParser(self)
        self._reset()

    def _reset(self) -> None:
        self._reading = self._timed = False
        self._exchange: Exchange | None = None
        self._refused: ApiError | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    # The connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._connections.add(self)
        self._connections.strangers[self] = None
        self._set_timer(min(self._limits.head_s, self._limits.idle_s))
        if len(self._connections) > self._limits.connections:
            next(iter(self._connections.strangers)).abort()  # at worst this one

    def connection_lost(self, reason: Exception | None) -> None:
        self.lost = self.closing = True
        self._connections.discard(self)
        self._connections.strangers.pop(self, None)
        self._release()
        self._set_timer(None)
        self.writable.set()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def write(self, data: bytes) -> None:
        if not self.lost:
            self._transport.write(data)

    async def drained(self) -> None:
        if not self.writable.is_set():
            try:
                async with asyncio.timeout(self._limits.send_s):
                    await self.writable.wait()
            except TimeoutError:
                self._transport.abort()
                raise ClientGone from None
        if self.lost:
            raise ClientGone

    def shut(self) -> None:
        """Close after the response that is under way, if there is one."""
        self.closing = True
        if self.task is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _release(self) -> None:
        self._connections.buffered -= self._held
        self._held = 0

    def _set_timer(self, seconds: float | None) -> None:
        """Restart the timer; None stops it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        self._ignoring = self.closing = True
        if self._exchange is not None:
            self._refused = self._refused or ApiError(
                408, f"the request was not complete within {self._limits.read_s:g} s", code="request_timeout"
            )
            self._app.refuse(self._exchange, self._refused)
        self._transport.close()

    # Reading a request

    def data_received(self, data: bytes) -> None:
        if self.task is not None:
            self._ignoring = self.closing = True
        if self._ignoring:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._ignoring = self.closing = True  # it is refused; what follows is in another protocol
        except httptools.HttpParserError as error:
            self._reject(f"this is not HTTP: {error}")
        if self._reading and not self._ignoring:
            self._read_more(len(data))

    def _read_more(self, size: int) -> None:
        """The request is not complete after these `size` bytes."""
        if not self._timed:
            self._timed = True
            self._set_timer(self._limits.read_s)
        if self._exchange is None:
            self._size += size
            if self._size > HEAD_BYTES:
                self._reject(f"the head of the request has more than {HEAD_BYTES:,} bytes")

    def _reject(self, message: str) -> None:
        if self.task is None and not self._ignoring:
            self._ignoring = self.closing = True
            self._app.refuse(self._exchange or Exchange(self, "", "", {}), invalid(message))
            self._transport.close()

    def on_message_begin(self) -> None:
        self._reading = True
        if self.task is not None:
            self._ignoring = self.closing = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._ignoring:
            return
        path = unquote(self._url.partition(b"?")[0].decode("latin-1"))
        self._exchange = Exchange(self, self._parser.get_method().decode("ascii"), path, self._headers)
        self.chunks = self._parser.get_http_version() == "1.1"
        upgrade = self._parser.should_upgrade()
        self.closing = upgrade or not self._parser.should_keep_alive()
        self._size = 0
        try:
            self._exchange.route = self._app.route(self._exchange)
            if int(self._headers.get(b"content-length", b"0")) > self._limits.body_bytes:
                raise self._too_large()
            if upgrade:
                raise invalid("this server speaks HTTP/1.1 only; send no Upgrade header")
        except ApiError as error:
            self._refused = error
        if self._exchange.known:
            self._connections.strangers.pop(self, None)
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        if self._refused is not None or self._exchange is None:
            return
        self._size += len(piece)
        self._held += len(piece)
        self._connections.buffered += len(piece)
        self._pieces.append(piece)
        if self._size > self._limits.body_bytes:
            self._refused = self._too_large()
        elif self._connections.buffered > self._limits.buffer_bytes:
            self._refused = busy(f"the gateway holds {self._limits.buffer_bytes:,} bytes of requests, its limit")
        if self._refused is not None:
            self._pieces.clear()
            self._release()

    def _too_large(self) -> ApiError:
        reason = f"the body is larger than {self._limits.body_bytes:,} bytes"
        return ApiError(413, reason, code="request_too_large")

    def on_message_complete(self) -> None:
        exchange, refused = self._exchange, self._refused
        if exchange is None:
            return
        exchange.body = b"".join(self._pieces)
        self._set_timer(None)
        self._reset()
        if refused is not None:
            self._app.refuse(exchange, refused)
            self._next()
        else:
            self.task = self._loop.create_task(self._handle(exchange))

    async def _handle(self, exchange: Exchange) -> None:
        try:
            await self._app.handle(exchange)
        finally:
            self.task = None
            self._release()
            self._next()

    def _next(self) -> None:
        if self.lost:
            return
        if self.closing:
            self._ignoring = True
            self._transport.close()
        else:
            self._set_timer(self._limits.idle_s)


@asynccontextmanager
async def listening(app: Application, host: str, port: int = 0) -> AsyncIterator[str]:
    """Serve `app` while the block runs; yields the URL. Raises ServiceError if it cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server_socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ServiceError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another port") from error
    connections = OpenConnections()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(app, connections), sock=server_socket, backlog=BACKLOG)
    address, number = server_socket.getsockname()[:2]
    try:
        yield f"http://[{address}]:{number}" if family == socket.AF_INET6 else f"http://{address}:{number}"
    finally:
        server.close()
        await _close_all(connections)


async def _close_all(connections: set[Connection]) -> None:
    """Each after the response that is under way, for at most END_S."""
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


def _head(status: int, kind: bytes, headers: Headers, framing: bytes, closing: bool) -> bytes:
    lines = b"".join([b"%s: %s\r\n" % header for header in headers])
    end = b"connection: close\r\n\r\n" if closing else b"\r\n"
    return b"".join((_STATUS[status], _date(int(time.time())), b"content-type: ", kind, b"\r\n", lines, framing, end))


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"date: {format_date_time(second)}\r\n".encode()
