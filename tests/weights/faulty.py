"""A wire that can be cut, and that can change what it carries: a TCP proxy in front of a real server."""

import contextlib
import socket
import threading
from collections.abc import Callable

Carry = Callable[[int, bytes], bytes | None]
"""Given how many bytes the server has sent on this connection before, and the next ones: what arrives; None cuts it."""


class Wire:
    """`carry(connection number)` tells how the answers on a connection are carried."""

    def __init__(self, upstream: str, carry: Callable[[int], Carry]) -> None:
        host, _, port = upstream.removeprefix("http://").rpartition(":")
        self._upstream, self._carry = (host, int(port)), carry
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._upstream)
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()
            threading.Thread(target=self._answer, args=(far, near, self._carry(number)), daemon=True).start()
            number += 1

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        while data := _received(near):
            self.requests.append(data)
            far.sendall(data)
        far.close()

    def _answer(self, far: socket.socket, near: socket.socket, carry: Carry) -> None:
        total = 0
        with near, contextlib.suppress(OSError):  # whoever is at the near end may leave at any time
            while data := _received(far):
                arrives = carry(total, data)
                total += len(data)
                if arrives is None:
                    near.shutdown(socket.SHUT_RDWR)
                    return
                near.sendall(arrives)

    def close(self) -> None:
        self._listener.close()


def _received(side: socket.socket) -> bytes:
    try:
        return side.recv(1024)
    except OSError:
        return b""


def faithful(total: int, data: bytes) -> bytes:
    return data


def flipping(at: int) -> Carry:
    """The byte `at` of all that comes on the connection arrives as another."""

    def carry(total: int, data: bytes) -> bytes:
        if total <= at < total + len(data):
            index = at - total
            data = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        return data

    return carry


def cut_after(count: int) -> Carry:
    return lambda total, data: data if total + len(data) < count else None
