"""HTTP/1.1 on one connection: bytes become requests, answers become bytes.

A web framework around each request costs more CPU than all that the gateway does with it. This is the parser that
they use, and next to nothing around it.

The invariants:
- A connection answers one request at a time, in one task, which is cancelled when the client leaves. What a client
  sends before it has its answer is not read any further: the connection ends after that answer.
- A request is looked at when its head is there: the body of one that will be refused is read and dropped.
- A head and a body have a size and a time limit, silence and the taking of an answer a time limit.
- What is written is with the system, or in a buffer that is small unless the answer came in one piece; `drained` tells
  when it is.
"""

import asyncio
import time
from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote
from wsgiref.handlers import format_date_time

import httptools

from rollart.gateway.errors import ApiError, invalid
from rollart.gateway.limits import GatewayLimits

HEAD_BYTES = 64 << 10
Fields = Iterable[tuple[bytes, bytes]]
_STATUS = {int(each): b"HTTP/1.1 %d %s\r\n" % (each, each.phrase.encode()) for each in HTTPStatus}


class Gone(Exception):
    """The client has left."""


class Application(Protocol):
    limits: GatewayLimits

    def route(self, request: "Exchange") -> Any:
        """What `handle` will need. Raises ApiError for a request that is refused whatever its body says."""
        ...

    async def handle(self, request: "Exchange") -> None: ...

    def refuse(self, request: "Exchange", error: ApiError) -> None:
        """Answers it with the error."""
        ...


class Exchange:
    """A request, and the way to answer it: `answer` once, or `begin`, `write` as often as there is something, `end`."""

    __slots__ = ("_connection", "begun", "body", "ended", "headers", "method", "path", "route")

    def __init__(self, connection: "Connection", method: str, path: str, headers: dict[bytes, bytes]) -> None:
        self._connection = connection
        self.method, self.path, self.headers = method, path, headers
        self.body = b""
        self.route: Any = None
        self.begun = self.ended = False

    @property
    def ready(self) -> bool:
        """Whether the client has taken most of what was written."""
        return self._connection.writable.is_set()

    def answer(self, status: int, kind: bytes, body: bytes, fields: Fields = ()) -> None:
        self.begun = self.ended = True
        head = _head(status, kind, fields, b"content-length: %d\r\n" % len(body), self._connection.closing)
        self._connection.write(head if self.method == "HEAD" else head + body)

    def begin(self, kind: bytes, fields: Fields = ()) -> None:
        """An answer in pieces. A client that does not know pieces knows the end by that of the connection."""
        self.begun = True
        connection = self._connection
        framing = b"transfer-encoding: chunked\r\n" if connection.chunks else b""
        connection.write(_head(200, kind, fields, framing, connection.closing))

    def write(self, piece: bytes) -> None:
        self._connection.write(b"%x\r\n%s\r\n" % (len(piece), piece) if self._connection.chunks else piece)

    def end(self) -> None:
        self.ended = True
        if self._connection.chunks:
            self._connection.write(b"0\r\n\r\n")

    async def drained(self) -> None:
        """All but a little is with the system. Raises Gone."""
        await self._connection.drained()


class Connection(asyncio.Protocol):
    """`connections` is the set of all of a server's, in which this one is while it lasts."""

    def __init__(self, app: Application, connections: "set[Connection]") -> None:
        self._app, self._limits, self._connections = app, app.limits, connections
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.lost = self.closing = False  # closing: there is nothing after the answer that is under way
        self._deaf = False
        self.chunks = True
        self._parser: Any = httptools.HttpRequestParser(self)
        self._renew()

    def _renew(self) -> None:
        self._reading = self._hurried = False
        self._exchange: Exchange | None = None
        self._refused: ApiError | None = None
        self._url = b""
        self._fields: dict[bytes, bytes] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    # The connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._connections.add(self)
        self._wait(self._limits.idle_s)

    def connection_lost(self, reason: Exception | None) -> None:
        self.lost = self.closing = True
        self._connections.discard(self)
        self._wait(None)
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
                raise Gone from None
        if self.lost:
            raise Gone

    def shut(self) -> None:
        """After the answer that is under way, if there is one."""
        self.closing = True
        if self.task is None:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _wait(self, seconds: float | None) -> None:
        """At most so long for whatever comes next."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._late)

    def _late(self) -> None:
        self._deaf = self.closing = True
        if self._exchange is not None:
            self._refused = self._refused or ApiError(
                408, f"the request did not come within {self._limits.read_s:g} s", code="request_timeout"
            )
            self._app.refuse(self._exchange, self._refused)
        self._transport.close()

    # A request comes

    def data_received(self, data: bytes) -> None:
        if self.task is not None:
            self._deaf = self.closing = True
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = self.closing = True  # it was refused; what follows is in another protocol
        except httptools.HttpParserError as error:
            self._give_up(f"this is not HTTP: {error}")
        if self._reading and not self._deaf:
            self._partly(len(data))

    def _partly(self, size: int) -> None:
        """More of a request than these bytes is still to come."""
        if not self._hurried:
            self._hurried = True
            self._wait(self._limits.read_s)
        if self._exchange is None:
            self._size += size
            if self._size > HEAD_BYTES:
                self._give_up(f"the head of the request has more than {HEAD_BYTES:,} bytes")

    def _give_up(self, message: str) -> None:
        if self.task is None and not self._deaf:
            self._deaf = self.closing = True
            self._app.refuse(self._exchange or Exchange(self, "", "", {}), invalid(message))
            self._transport.close()

    def on_message_begin(self) -> None:
        self._reading = True
        if self.task is not None:
            self._deaf = self.closing = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        path = unquote(self._url.partition(b"?")[0].decode("latin-1"))
        self._exchange = Exchange(self, self._parser.get_method().decode("ascii"), path, self._fields)
        self.chunks = self._parser.get_http_version() == "1.1"
        upgrade = self._parser.should_upgrade()
        self.closing = upgrade or not self._parser.should_keep_alive()
        self._size = 0
        try:
            self._exchange.route = self._app.route(self._exchange)
            self._within(int(self._fields.get(b"content-length", b"0")))
            if upgrade:
                raise invalid("this server speaks HTTP/1.1 and nothing else; send no Upgrade header")
        except ApiError as error:
            self._refused = error
        if self._fields.get(b"expect", b"").lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, piece: bytes) -> None:
        if self._refused is not None or self._exchange is None:
            return
        self._size += len(piece)
        self._pieces.append(piece)
        try:
            self._within(self._size)
        except ApiError as error:
            self._refused = error
            self._pieces.clear()

    def _within(self, size: int) -> None:
        most = self._limits.body_bytes
        if size > most:
            raise ApiError(413, f"the body is larger than {most:,} bytes", code="request_too_large")

    def on_message_complete(self) -> None:
        exchange, refused = self._exchange, self._refused
        if exchange is None:
            return
        exchange.body = b"".join(self._pieces)
        self._wait(None)
        self._renew()
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
            self._next()

    def _next(self) -> None:
        if self.lost:
            return
        if self.closing:
            self._deaf = True
            self._transport.close()
        else:
            self._wait(self._limits.idle_s)


def _head(status: int, kind: bytes, fields: Fields, framing: bytes, closing: bool) -> bytes:
    said = b"".join([b"%s: %s\r\n" % field for field in fields])
    end = b"connection: close\r\n\r\n" if closing else b"\r\n"
    return b"".join((_STATUS[status], _date(int(time.time())), b"content-type: ", kind, b"\r\n", said, framing, end))


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return f"date: {format_date_time(second)}\r\n".encode()
