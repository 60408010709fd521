"""TCP keepalive: how a connection notices that the machine at its other end is gone.

A dead machine sends nothing: an idle connection would wait forever, and one with unsent data for 15 minutes. Here the
kernels probe each other, without Python: a busy process is not taken for dead, a silent machine is within `TIMEOUT_S`.
"""

import socket

TIMEOUT_S = 8
_IDLE_S, _PROBE_EVERY_S = 2, 2


def enable_keepalive(connection: socket.socket) -> None:
    """Calls on it fail once its other end has been silent for `TIMEOUT_S` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; other systems keep their slower defaults
        options = {
            socket.TCP_KEEPIDLE: _IDLE_S,
            socket.TCP_KEEPINTVL: _PROBE_EVERY_S,
            socket.TCP_KEEPCNT: (TIMEOUT_S - _IDLE_S) // _PROBE_EVERY_S,
            socket.TCP_USER_TIMEOUT: TIMEOUT_S * 1000,  # the same for sent data that is not acknowledged
        }
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
