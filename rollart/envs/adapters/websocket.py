"""A WebSocket client with the standard library alone: text messages, synchronous, with deadlines."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import ssl
import struct
from urllib.parse import urlsplit

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
MAX_BYTES = 16_000_000


class WebSocketLost(Exception):
    """The server is gone, late, or does not speak WebSocket; the message says which."""


class WebSocket:
    """Connects when constructed. `seconds` is the deadline of each message."""

    def __init__(self, url: str, seconds: float = 30.0) -> None:
        parts = urlsplit(url)
        secure = parts.scheme in ("wss", "https")
        host, port = parts.hostname or "", parts.port or (443 if secure else 80)
        self._url = url
        try:
            self._socket = socket.create_connection((host, port), seconds)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if secure:
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
            self._file = self._socket.makefile("rb")
            self._handshake(parts.netloc, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
        except OSError as error:
            raise WebSocketLost(f"{url} cannot be reached: {error}") from error

    def _handshake(self, host: str, path: str) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        status = self._file.readline(1000).decode(errors="replace").strip()
        if " 101 " not in f"{status} ":
            raise WebSocketLost(f"{self._url} does not speak WebSocket: its reply was {status!r}")
        while self._file.readline(65536).strip():
            pass

    def send(self, text: str) -> None:
        self._frame(TEXT, text.encode())

    def receive(self) -> str:
        """The next text message; control frames are handled here."""
        message = b""
        while True:
            final, kind, data = self._next()
            if kind == CLOSE:
                raise WebSocketLost(f"{self._url} closed the connection: {data[2:].decode(errors='replace')}")
            if kind == PING:
                self._frame(PONG, data)
            elif kind != PONG:
                message += data
                if len(message) > MAX_BYTES:
                    raise WebSocketLost(f"{self._url} sent more than {MAX_BYTES:,} bytes at once")
                if final:
                    return message.decode()

    def close(self) -> None:
        with contextlib.suppress(WebSocketLost):  # it is closed already
            self._frame(CLOSE, struct.pack("!H", 1000))
        self._file.close()
        self._socket.close()

    def _frame(self, kind: int, data: bytes) -> None:
        size = len(data)
        head = struct.pack("!B", 0x80 | kind)
        if size < 126:
            head += struct.pack("!B", 0x80 | size)
        elif size < 65536:
            head += struct.pack("!BH", 0x80 | 126, size)
        else:
            head += struct.pack("!BQ", 0x80 | 127, size)
        mask = os.urandom(4)
        number = int.from_bytes(data, "big") ^ int.from_bytes((mask * (size // 4 + 1))[:size], "big")
        try:
            self._socket.sendall(head + mask + number.to_bytes(size, "big"))
        except OSError as error:
            raise WebSocketLost(f"{self._url} is gone: {error}") from error

    def _next(self) -> tuple[bool, int, bytes]:
        first, second = self._read(2)
        size = second & 127
        if size >= 126:
            (size,) = struct.unpack("!H", self._read(2)) if size == 126 else struct.unpack("!Q", self._read(8))
        if size > MAX_BYTES:
            raise WebSocketLost(f"{self._url} sent more than {MAX_BYTES:,} bytes at once")
        return bool(first & 0x80), first & 15, self._read(size)

    def _read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise WebSocketLost(f"{self._url} did not reply: {error}") from error
        if len(data) < size:
            raise WebSocketLost(f"{self._url} is gone")
        return data
