"""The connection, byte by byte, without a network."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from wire import Wire, parsed

from rollart.gateway.errors import ApiError
from rollart.gateway.http import HEAD_BYTES, ClientGone, Connection, Exchange, OpenConnections
from rollart.gateway.limits import GatewayLimits

POST = b"POST /echo HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello"


class Echo:
    """Answers with the body. /stream: in two pieces; /refused: not at all; /wait: when the gate opens."""

    def __init__(self, limits: GatewayLimits | None = None) -> None:
        self.limits = limits or GatewayLimits()
        self.gate = asyncio.Event()
        self.bodies: list[bytes] = []
        self.cancelled = 0

    def route(self, exchange: Exchange) -> Any:
        if exchange.path == "/refused":
            raise ApiError(401, "no")

    async def handle(self, exchange: Exchange) -> None:
        self.bodies.append(exchange.body)
        try:
            if exchange.path == "/wait":
                await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if exchange.path == "/stream":
            exchange.begin(b"text/plain")
            exchange.write(b"one,")
            exchange.write(b"two")
            exchange.end()
        else:
            exchange.respond(200, b"text/plain", exchange.body)

    def refuse(self, exchange: Exchange, error: ApiError) -> None:
        exchange.respond(error.status, b"text/plain", str(error).encode())


def with_wire(test: Callable[[Wire, Echo], Awaitable[None]], limits: GatewayLimits | None = None) -> None:
    async def run() -> None:
        app = Echo(limits)
        async with asyncio.timeout(10):
            await test(Wire(Connection(app, OpenConnections())), app)

    asyncio.run(run())


async def answered(wire: Wire) -> None:
    while wire.connection.task is not None:
        await asyncio.wait([wire.connection.task])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_request_may_come_in_any_pieces_and_another_after_it(size: int) -> None:
    async def test(wire: Wire, app: Echo) -> None:
        for _ in range(2):
            for at in range(0, len(POST), size):
                wire.send(POST[at : at + size])
            await answered(wire)
        assert app.bodies == [b"hello", b"hello"]
        assert wire.received.count(b"HTTP/1.1 200 OK\r\n") == 2 and not wire.closed

    with_wire(test)


def test_the_connection_is_closed_after_the_response_if_the_client_asks_for_it() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(b"POST /echo HTTP/1.1\r\nconnection: close\r\ncontent-length: 5\r\n\r\n")
        wire.send(b"hello")
        await answered(wire)
        status, headers, body = parsed(wire.received)
        assert (status, headers[b"connection"], body, wire.closed) == (200, b"close", b"hello", True)

    with_wire(test)


@pytest.mark.parametrize(("version", "framing"), [(b"1.1", b"chunked"), (b"1.0", None)])
def test_an_answer_in_pieces_is_framed_as_its_client_can_read_it(version: bytes, framing: bytes | None) -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(b"GET /stream HTTP/" + version + b"\r\n\r\n")
        await answered(wire)
        _, headers, body = parsed(wire.received)
        assert (headers.get(b"transfer-encoding"), body) == (framing, b"one,two")
        assert wire.closed == (version == b"1.0")

    with_wire(test)


def test_data_before_the_response_is_not_read_and_closes_the_connection_after_it() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(POST.replace(b"/echo", b"/wait") + POST)
        await asyncio.sleep(0)
        wire.send(POST)
        app.gate.set()
        await answered(wire)
        assert app.bodies == [b"hello"] and wire.closed
        assert wire.received.count(b"HTTP/1.1") == 1

    with_wire(test)


def test_a_request_that_is_refused_by_its_head_is_answered_after_its_body_and_the_next_is_served() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(b"POST /refused HTTP/1.1\r\ncontent-length: 100000\r\n\r\n")
        assert not wire.received
        wire.send(b"x" * 100_000)
        assert wire.received.startswith(b"HTTP/1.1 401 Unauthorized\r\n")
        wire.send(POST)
        await answered(wire)
        assert app.bodies == [b"hello"]

    with_wire(test)


def test_a_client_that_expects_100_continue_gets_it() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(b"POST /echo HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert wire.received == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.send(b"hello")
        await answered(wire)
        assert wire.received.endswith(b"hello")

    with_wire(test)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"nonsense\r\n\r\n", b"this is not HTTP"),
        (b"GET / HTTP/1.1\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n", b"HTTP/1.1 only"),
        (POST.replace(b"\r\n", b"\r\nupgrade: h2c\r\nconnection: upgrade\r\n", 1), b"HTTP/1.1 only"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (HEAD_BYTES + 10), b"the head of the request has more than"),
    ],
)
def test_an_invalid_request_gets_a_400_and_the_connection_is_closed(sent: bytes, why: bytes) -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(sent)
        await answered(wire)
        assert wire.received.startswith(b"HTTP/1.1 400") and why in wire.received and wire.closed
        assert not app.bodies

    with_wire(test)


def test_incomplete_requests_and_idle_connections_time_out() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        silent = Wire(Connection(app, OpenConnections()))
        wire.send(POST[:-1])
        await asyncio.gather(wire.ended.wait(), silent.ended.wait())
        assert wire.received.startswith(b"HTTP/1.1 408") and not silent.received

    with_wire(test, GatewayLimits(read_s=0.01, idle_s=0.02))


def test_a_client_that_disconnects_cancels_its_request() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(POST.replace(b"/echo", b"/wait"))
        await asyncio.sleep(0)
        task = wire.connection.task
        assert task is not None
        wire.leave()
        await asyncio.wait([task])
        assert app.cancelled == 1

    with_wire(test)


def test_a_client_that_does_not_read_its_response_is_disconnected() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        connection = wire.connection
        connection.pause_writing()
        exchange = Exchange(connection, "GET", "/", {})
        assert not exchange.ready
        with pytest.raises(ClientGone):
            await exchange.drained()
        assert wire.closed

    with_wire(test, GatewayLimits(send_s=0.01))


def test_head_gets_no_body() -> None:
    async def test(wire: Wire, app: Echo) -> None:
        wire.send(POST.replace(b"POST", b"HEAD"))
        await answered(wire)
        _, headers, body = parsed(wire.received)
        assert (headers[b"content-length"], body) == (b"5", b"")

    with_wire(test)
