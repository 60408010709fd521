"""The gateway's HTTP server, on real sockets."""

import asyncio
import socket
from pathlib import Path

import aiohttp
import pytest
from gateways import tiny_template

from rollart.core.errors import ServiceError
from rollart.gateway.app import App
from rollart.gateway.http import listening
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.session import SessionTable


def app(folder: Path) -> App:
    template = tiny_template(folder)

    async def generate(*asked: object) -> None:
        raise AssertionError("nothing is generated here")

    return App(template, SessionTable(template, generate), GatewayLimits(), "tiny")  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_answers_at_the_url_that_it_yields(tmp_path: Path, host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")

    async def body() -> None:
        async with (
            asyncio.timeout(30),
            listening(app(tmp_path), host) as url,
            aiohttp.ClientSession() as session,
            session.get(f"{url}/health") as answer,
        ):
            assert answer.status == 200

    asyncio.run(body())


def test_a_port_that_is_taken_is_a_clear_error(tmp_path: Path) -> None:
    async def body(port: int) -> None:
        with pytest.raises(ServiceError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .* choose another port"):
            async with listening(app(tmp_path), "127.0.0.1", port):
                raise AssertionError("it listens where somebody else does")

    with socket.create_server(("127.0.0.1", 0)) as other:
        asyncio.run(body(other.getsockname()[1]))
