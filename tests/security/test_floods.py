"""Strangers flood the gateway, the weights and a service; those with a key are served all the same."""

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollart.gateway.limits import GatewayLimits
from rollart.launch import service
from rollart.launch.launcher import Command
from rollart.launch.local import LocalLauncher, ResourceRequest
from rollart.launch.rpc import connected
from rollart.weights import server
from rollart.weights.server import WeightServer
from rollart.weights.store import Store
from tests.gateway.gateways import KEY, Policy, gateway, tiny_template


@contextmanager
def strangers(address: tuple[str, int], count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    sockets = [socket.create_connection(address, 20) for _ in range(count)]
    for each in sockets:
        each.sendall(sent)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()


def test_weights_have_no_thread_for_a_connection_without_the_key(tmp_path: Path) -> None:
    serving = WeightServer(Store(tmp_path), key="secret")
    host, _, port = serving.url.removeprefix("http://").partition(":")
    before = threading.active_count()
    try:
        for sent in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n"):
            with strangers((host, int(port)), server.MAX_CALLERS + 10, sent):
                request = urllib.request.Request(serving.url + "/x", headers={"Authorization": "Bearer secret"})
                with pytest.raises(urllib.error.HTTPError, match="404"):  # served, by a thread of its own
                    urllib.request.urlopen(request, timeout=20)
                assert threading.active_count() <= before + 2
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(serving.url + "/x", timeout=20)
    finally:
        serving.close()


def post(url: str, body: bytes, key: str = KEY) -> int:
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


CHAT = {"messages": [{"role": "user", "content": "a"}]}


def at_gateway(tmp_path: Path, limits: GatewayLimits, attack: "object") -> object:
    async def scene() -> object:
        template = tiny_template(tmp_path / "model")
        async with gateway(template, Policy(template), limits=limits) as running:
            host, _, port = running.url.removeprefix("http://").partition(":")
            return await asyncio.to_thread(attack, running.url, (host, int(port)))  # type: ignore[arg-type]

    return asyncio.run(scene())


def test_the_gateway_serves_a_key_while_strangers_hold_all_connections_that_it_may_have(tmp_path: Path) -> None:
    def attack(url: str, address: tuple[str, int]) -> int:
        with strangers(address, 40):
            return post(url, json.dumps(CHAT).encode())

    assert at_gateway(tmp_path, GatewayLimits(connections=8), attack) == 200


def test_bodies_that_were_begun_count_before_they_are_complete(tmp_path: Path) -> None:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 900000\r\n\r\n".encode()
    )

    def attack(url: str, address: tuple[str, int]) -> list[int]:
        with strangers(address, 5, head + bytes(300_000)) as open_:
            large = post(url, json.dumps({**CHAT, "padding": "x" * 600_000}).encode())
            del open_
        return [large, post(url, json.dumps(CHAT).encode())]

    assert at_gateway(tmp_path, GatewayLimits(buffer_bytes=1_000_000), attack) == [429, 200]


@pytest.mark.parametrize("stop", [["x"] * 100, ["x" * 2000], [str(n) for n in range(100_000)]])
def test_the_gateway_refuses_endless_lists_of_stop_strings(tmp_path: Path, stop: list[str]) -> None:
    body = json.dumps({**CHAT, "stop": stop}).encode()
    assert at_gateway(tmp_path, GatewayLimits(), lambda url, address: post(url, body)) == 400


def test_a_service_answers_its_controller_while_strangers_hold_connections(tmp_path: Path) -> None:
    async def body() -> str:
        launcher = LocalLauncher(())
        argv = (str(Path(__file__).parents[1] / "launch" / "echo_service.py"),)
        child = await launcher.launch(Command("echo", argv, {}, tmp_path / "log"), ResourceRequest())
        host, _, port = child.answer["url"].removeprefix("http://").partition(":")
        try:
            with strangers((host, int(port)), service.MAX_CALLERS + 20, b"GET /rpc HTTP/1.1\r\n") as open_:
                async with connected(child.answer["url"], key=launcher.key):
                    open_[0].settimeout(20)
                    return "closed" if await asyncio.to_thread(open_[0].recv, 1) == b"" else "open"
        except ConnectionResetError:
            return "closed"
        finally:
            await launcher.close()

    assert asyncio.run(body()) == "closed"
