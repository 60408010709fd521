"""Calls between the controller and a service: one WebSocket, msgpack, many small messages in one frame.

Invariants: calls on a connection run concurrently and return in any order; all messages of one turn of the event loop
leave in one frame, and a large frame in parts, so that no message is too large; a lost connection fails every open call
at once; a call that is cancelled or times out is cancelled at the service too; streamed values arrive in order, before
the answer; a service with a key refuses callers without it.
"""

import asyncio
import contextlib
import hmac
import inspect
import itertools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar, get_type_hints

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from rollart.core.errors import ServiceError, ServiceSilent
from rollart.launch.keepalive import enable_keepalive

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]
Stream = Callable[[object], None]
PART_BYTES = 32 << 20
MAX_FRAME = PART_BYTES + 1024
_PART = b"\xc1"  # no frame begins with it: msgpack never uses it
ENGINE_KEY = "ROLLART_ENGINE_KEY"  # environment variable: the key of external engines
# The kernel notices a dead machine (see `enable_keepalive`). This ping finds a process that hangs; it is slow because
# one that holds the GIL for seconds, in a forward pass or while it loads weights, is not dead. aiohttp pings after this
# many seconds without a message and waits half as long for the answer.
PING_S = 20.0
_CANCEL = "$cancel"
_ITEM = None  # neither success nor failure: a streamed value

_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(list[tuple[int, str, msgspec.Raw]])
_answers = msgspec.msgpack.Decoder(list[tuple[int, bool | None, msgspec.Raw]])
logger = logging.getLogger(__name__)


class _Outbox:
    """Collects messages and sends all pending ones as one frame."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._pending: list[tuple[int, str | bool | None, msgspec.Raw]] = []
        self._wake = asyncio.Event()

    def put(self, call: int, head: str | bool | None, value: object) -> None:
        self._pending.append((call, head, msgspec.Raw(_encoder.encode(value))))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            frame, self._pending = self._pending, []
            await self._send_frame(_encoder.encode(frame))

    async def _send_frame(self, data: bytes) -> None:
        if len(data) <= PART_BYTES:
            await self._send(data)
            return
        view = memoryview(data)
        for at in range(0, len(data), PART_BYTES):
            await self._send(_PART + view[at : at + PART_BYTES])
        await self._send(_PART)


class _Inbox:
    """Frames as they were sent: parts are joined."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def frame(self, data: bytes) -> bytes | None:
        """None: it is not complete yet."""
        if data[:1] != _PART:
            return data
        if len(data) > 1:
            self._parts.append(data[1:])
            return None
        parts, self._parts = self._parts, []
        return b"".join(parts)


def application(handlers: Mapping[str, Handler], key: str | None = None) -> Starlette:
    """A service whose methods are `handlers`: async functions of at most one argument, decoded to its annotation. A
    last parameter of type `Stream` sends the caller values before the answer. Callers must show the `key`, if any."""
    methods = {name: _Method(handler) for name, handler in handlers.items()}

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"ok": True})

    async def connection(socket: WebSocket) -> None:
        credential = socket.headers.get("authorization", "").encode()
        if key is not None and not hmac.compare_digest(credential, _credential(key).encode()):
            await socket.send_denial_response(PlainTextResponse("the key of this run is missing", 401))
            return
        await socket.accept()
        outbox = _Outbox(socket.send_bytes)
        sender = asyncio.create_task(outbox.run())
        running: dict[int, asyncio.Task[None]] = {}
        inbox = _Inbox()
        try:
            while True:
                frame = inbox.frame(await socket.receive_bytes())
                for call, method, body in _calls.decode(frame) if frame is not None else ():
                    if method == _CANCEL:
                        if call in running:
                            running[call].cancel()
                        continue
                    task = asyncio.create_task(_answer(methods, outbox, call, method, body))
                    running[call] = task
                    task.add_done_callback(lambda _, call=call: running.pop(call, None))  # type: ignore[misc]
        except WebSocketDisconnect:
            pass  # the normal end of a connection
        finally:
            sender.cancel()
            for task in list(running.values()):
                task.cancel()

    return Starlette(routes=[Route("/health", health), WebSocketRoute("/rpc", connection)])


def _credential(key: str) -> str:
    return f"Bearer {key}"


class _Method:
    def __init__(self, handler: Handler) -> None:
        hints = get_type_hints(handler)
        types = [hints[name] for name in inspect.signature(handler).parameters]
        self._handler, self._streams = handler, types[-1:] == [Stream]
        arguments = types[:-1] if self._streams else types
        self._decoder = msgspec.msgpack.Decoder(arguments[0]) if arguments else None

    async def __call__(self, body: msgspec.Raw, stream: Stream) -> Any:
        arguments = () if self._decoder is None else (self._decoder.decode(body),)
        return await (self._handler(*arguments, stream) if self._streams else self._handler(*arguments))


async def _answer(methods: Mapping[str, _Method], outbox: _Outbox, call: int, method: str, body: msgspec.Raw) -> None:
    try:
        if method not in methods:
            raise ServiceError(f"this service has no method {method!r}")
        value = await methods[method](body, lambda item: outbox.put(call, _ITEM, item))
        if call > 0:
            outbox.put(call, True, value)
    except Exception as error:  # the boundary: every failure of a handler goes to the caller
        if call < 0:
            logger.exception("%s failed; its caller does not wait for the answer", method)
        else:
            outbox.put(call, False, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def ignore_item(item: msgspec.Raw) -> None:
    """The default of `on_item`."""


class RpcClient:
    """The calling side of one connection, created by `connect`."""

    def __init__(
        self, url: str, key: str | None, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse
    ) -> None:
        self.url, self.key = url, key
        self._session = session
        self._socket = socket
        self._outbox = _Outbox(socket.send_bytes)
        self._numbers = itertools.count(1)  # negated: no answer is expected
        self._open: dict[int, tuple[asyncio.Future[msgspec.Raw], Callable[[msgspec.Raw], None]]] = {}
        self._lost: str | None = None
        self._gone = asyncio.Event()
        self._tasks = [asyncio.create_task(self._outbox.run()), asyncio.create_task(self._receive())]

    @property
    def alive(self) -> bool:
        return self._lost is None

    async def lost(self) -> str:
        """Wait until the connection has ended; returns why."""
        await self._gone.wait()
        return self._lost or ""

    async def call(
        self,
        method: str,
        argument: object = None,
        *,
        returns: type[T],
        deadline: float,
        on_item: Callable[[msgspec.Raw], None] = ignore_item,
    ) -> T:
        """Raises ServiceError when the service fails or is lost, ServiceSilent after `deadline` seconds. `on_item`
        gets each streamed value, still encoded; it must not raise."""
        if self._lost is not None:
            raise ServiceError(self._lost)
        number, loop = next(self._numbers), asyncio.get_running_loop()
        future: asyncio.Future[msgspec.Raw] = loop.create_future()
        self._open[number] = future, on_item
        self._outbox.put(number, method, argument)
        timer = loop.call_later(deadline, _expire, future)  # costs less than half of `asyncio.timeout`
        try:
            body = await future
        except TimeoutError:
            self._cancel(number)
            raise ServiceSilent(f"{self.url} did not answer {method!r} within {deadline:g} s") from None
        except asyncio.CancelledError:
            self._cancel(number)
            raise
        finally:
            timer.cancel()
            self._open.pop(number, None)
        return msgspec.msgpack.decode(body, type=returns)

    def send(self, method: str, argument: object) -> None:
        """A call without an answer. It starts after earlier ones, unless the connection is lost."""
        if self._lost is None:
            self._outbox.put(-next(self._numbers), method, argument)

    def _cancel(self, number: int) -> None:
        if self._lost is None:
            self._outbox.put(number, _CANCEL, None)

    async def _receive(self) -> None:
        inbox = _Inbox()
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                frame = inbox.frame(message.data)
                for number, ok, body in _answers.decode(frame) if frame is not None else ():
                    future, on_item = self._open.get(number, (None, ignore_item))
                    if future is None or future.done():
                        continue
                    if ok is _ITEM:
                        on_item(body)
                    elif ok:
                        future.set_result(body)
                    else:
                        future.set_exception(ServiceError(msgspec.msgpack.decode(body, type=str)))
        finally:
            self.fail(f"the connection to {self.url} was lost")

    def fail(self, reason: str) -> None:
        """Treat the connection as lost: open calls fail with `reason`."""
        self._lost = self._lost or reason
        self._gone.set()
        for future, _ in self._open.values():
            if not future.done():
                future.set_exception(ServiceError(self._lost))

    async def close(self) -> None:
        self.fail(f"the connection to {self.url} was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._socket.close()
        await self._session.close()


def _expire(call: "asyncio.Future[msgspec.Raw]") -> None:
    if not call.done():
        call.set_exception(TimeoutError())


async def _refuse_redirect(session: object, context: object, about: aiohttp.TraceRequestRedirectParams) -> None:
    raise ServiceError(f"the service at {about.url} redirects to another address, which a service never does")


async def connect(url: str, *, key: str | None = None, deadline: float = 10.0) -> RpcClient:
    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_refuse_redirect)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=deadline)
    session = aiohttp.ClientSession(timeout=timeout, trace_configs=[tracing])
    headers = {} if key is None else {"Authorization": _credential(key)}
    try:
        async with asyncio.timeout(deadline):
            socket = await session.ws_connect(
                f"{url}/rpc", headers=headers, max_msg_size=MAX_FRAME, compress=0, heartbeat=PING_S
            )
        enable_keepalive(socket.get_extra_info("socket"))
    except aiohttp.WSServerHandshakeError as error:
        await session.close()
        refused = "it needs the key of the run that started it" if error.status == 401 else str(error)
        raise ServiceError(f"the service at {url} refused the connection: {refused}") from error
    except (TimeoutError, aiohttp.ClientError) as error:
        await session.close()
        raise ServiceError(f"no service answers at {url}: {error or 'timed out'}") from error
    except BaseException:
        await session.close()
        raise
    return RpcClient(url, key, session, socket)


@contextlib.asynccontextmanager
async def connected(url: str, *, key: str | None = None) -> AsyncIterator[RpcClient]:
    client = await connect(url, key=key)
    try:
        yield client
    finally:
        await client.close()


class ExternalService:
    """An engine that someone else runs: reached by its URL, never started or stopped. Implements
    `rollart.launch.launcher.ServiceHandle`; it ends when its connection is lost."""

    pid = 0
    node_lost = False

    def __init__(self, name: str, url: str, device: str) -> None:
        self.name, self.node, self.address, self.device = name, url, url, device
        self.answer: Mapping[str, Any] = {"url": url}
        self._client: RpcClient | None = None

    async def connect(self, stack: contextlib.AsyncExitStack) -> RpcClient:
        """Raises ServiceError."""
        self._client = await stack.enter_async_context(connected(self.address, key=os.environ.get(ENGINE_KEY)))
        return self._client

    async def wait(self) -> str:
        return await self._client.lost() if self._client is not None else f"{self.address} was never reached"

    async def stop(self) -> None:
        """It is not ours to stop."""

    def kill(self) -> None:
        """Disconnect: the supervisor connects again later."""
        if self._client is not None:
            self._client.fail(f"{self.address} was disconnected")
