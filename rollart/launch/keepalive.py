"""How a connection notices that the machine at its other end is gone.

Such a machine says nothing, so an idle connection would wait for ever, and one with unsent data for a quarter of an
hour. Here the kernels ask each other: the answer needs no Python, so a process that is only busy is never taken for
dead, while a silent machine is noticed within `SILENT_S`.
"""

import socket

SILENT_S = 8
_ASK_AFTER_S, _ASK_EVERY_S = 2, 2


def enable_keepalive(connection: socket.socket) -> None:
    """Make calls on it fail once its other end has been silent for `SILENT_S` seconds."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; elsewhere the system's own, slower settings hold
        options = {
            socket.TCP_KEEPIDLE: _ASK_AFTER_S,
            socket.TCP_KEEPINTVL: _ASK_EVERY_S,
            socket.TCP_KEEPCNT: (SILENT_S - _ASK_AFTER_S) // _ASK_EVERY_S,
            socket.TCP_USER_TIMEOUT: SILENT_S * 1000,  # the same for data that was sent and not acknowledged
        }
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
