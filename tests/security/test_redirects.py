"""A server answers with a redirect to another one, which waits for a bearer token."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollart.agents.demo import chat
from rollart.core.endpoint import Endpoint
from rollart.core.errors import EngineFailed, ServiceError
from rollart.core.llm_client import NoReply, ask
from rollart.engines.vllm.api import VllmApi
from rollart.envs.adapters.mcp_client import McpClient, McpError, McpHttp
from rollart.launch.rpc import connect
from rollart.rewards.transports.base import CallFailed
from rollart.rewards.transports.http import HttpTransport


class Servers:
    """`url` redirects to a second server, which notes the headers of whoever follows."""

    def __init__(self) -> None:
        self.followed: list[dict[str, str]] = []
        followed = self.followed

        class Waiting(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                followed.append(dict(self.headers))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._waiting = self._start(Waiting)
        target = f"http://127.0.0.1:{self._waiting.server_port}/stolen"

        class Redirecting(Waiting):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(302)
                self.send_header("Location", target)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_GET

        self._redirecting = self._start(Redirecting)
        self.url = f"http://127.0.0.1:{self._redirecting.server_port}"

    def _start(self, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    def close(self) -> None:
        for server in (self._waiting, self._redirecting):
            server.shutdown()
            server.server_close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


async def _vllm(url: str) -> None:
    async with VllmApi(url, key="token") as api:
        await api.post("/pause")


async def _reward(url: str) -> None:
    transport = HttpTransport(url, secret="token")
    try:
        await transport.send(b"{}", "id", 5.0)
    finally:
        await transport.close()


CLIENTS: dict[str, tuple[Callable[[str], object], type[Exception]]] = {
    "judge": (lambda url: ask(url, "m", [], key="TOKEN"), NoReply),
    "agent": (lambda url: chat(Endpoint(url, "token"), []), OSError),
    "mcp": (lambda url: McpClient(McpHttp(url, {"Authorization": "Bearer token"}), 5.0), McpError),
    "vllm": (lambda url: asyncio.run(_vllm(url)), EngineFailed),
    "rpc": (lambda url: asyncio.run(connect(url, key="token")), ServiceError),
    "reward": (lambda url: asyncio.run(_reward(url)), CallFailed),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_no_client_of_ours_follows_a_redirect(client: str, servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "token")
    call, error = CLIENTS[client]
    with pytest.raises(error):
        call(servers.url)
    assert servers.followed == []
