"""Our small WebSocket client against the server of the `websockets` package."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
from websockets.sync.server import ServerConnection, serve

from rollart.envs.adapters.websocket import WebSocket, WebSocketLost


@contextlib.contextmanager
def server(handler: Callable[[ServerConnection], None]) -> Iterator[str]:
    with serve(handler, "127.0.0.1", 0, max_size=None) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{running.socket.getsockname()[1]}/ws?x=1"
        finally:
            running.shutdown()
            thread.join(10)


def echo(connection: ServerConnection) -> None:
    for message in connection:
        connection.send(message)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 300_000])
def test_text_of_any_size_comes_back_unchanged(size) -> None:
    with server(echo) as url, contextlib.closing(WebSocket(url)) as socket:
        text = ("zß水🍌" * size)[:size]
        socket.send(text)
        assert socket.receive() == text


def test_pings_are_answered_and_fragments_joined() -> None:
    def handler(connection: ServerConnection) -> None:
        assert connection.ping().wait(10)
        connection.send(["a", "b", "c"])
        assert connection.recv() == "done"
        connection.send("bye")

    with server(handler) as url, contextlib.closing(WebSocket(url)) as socket:
        assert socket.receive() == "abc"
        socket.send("done")
        assert socket.receive() == "bye"


def test_a_server_that_closes_or_stays_silent_is_an_error_with_a_reason() -> None:
    with server(lambda connection: connection.close(reason="full")) as url:
        socket = WebSocket(url)
        with pytest.raises(WebSocketLost, match="closed the connection: full"):
            socket.receive()
        socket.close()
    silent = pytest.raises(WebSocketLost, match="did not reply")
    with server(echo) as url, contextlib.closing(WebSocket(url, seconds=0.2)) as socket, silent:
        socket.receive()


def test_a_server_that_is_not_there_is_an_error_with_a_reason() -> None:
    with pytest.raises(WebSocketLost, match="cannot be reached"):
        WebSocket("ws://127.0.0.1:1/ws")
