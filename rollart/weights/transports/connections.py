"""Connections to weight servers, kept between versions: making one costs both sides a thread or a handshake.

Invariants: a connection belongs to whoever took it until it is given back, and is given back only between two
requests. One on which anything has come since, its end above all, is not handed out again.
"""

import http.client
import socket
import threading
from collections import deque
from urllib.parse import urlsplit

KEPT = 16


class Connections:
    """Of this process. The last `KEPT` that were given back are kept."""

    def __init__(self) -> None:
        self._idle: deque[tuple[str, http.client.HTTPConnection]] = deque()
        self._lock = threading.Lock()

    def take(self, source: str, deadline: float) -> http.client.HTTPConnection:
        """To the server at the URL `source`; each read and write on it may take `deadline` seconds."""
        while (kept := self._kept(source)) is not None:
            if _quiet(kept):
                kept.timeout = deadline
                kept.sock.settimeout(deadline)
                return kept
            kept.close()
        host = urlsplit(source)
        return http.client.HTTPConnection(host.hostname or "", host.port, timeout=deadline)

    def give(self, source: str, connection: http.client.HTTPConnection) -> None:
        if connection.sock is None:
            return
        with self._lock:
            self._idle.append((source, connection))
            surplus = self._idle.popleft()[1] if len(self._idle) > KEPT else None
        if surplus is not None:
            surplus.close()

    def _kept(self, source: str) -> http.client.HTTPConnection | None:
        with self._lock:
            for one in self._idle:
                if one[0] == source:
                    self._idle.remove(one)
                    return one[1]
        return None


def _quiet(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.sock.settimeout(0)
        connection.sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
