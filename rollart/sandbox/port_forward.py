"""Forwards one port on the loopback of a sandbox, which has no other network, to one address outside.

A socket belongs to the network namespace in which it was made, whichever process holds it. So a child of ours enters
the sandbox's namespace, makes the listening socket and passes it to us, who serve it outside: nothing in the sandbox
has to help, and nothing in it can reach anything else. Linux, standard library only.

The invariants:
- A connection inside is one connection to `address`, and to nothing else.
- There are at most `MAX_CONNECTIONS` at the same time; others are closed at once.
- All of them, and the port, end with `close`.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollart.sandbox.bubblewrap import SandboxError

NS_GET_USERNS = 0xB701
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
MAX_CONNECTIONS = 128
CONNECT_S, END_S = 10.0, 10.0
PIECE = 65536
LIBC = ctypes.CDLL(None, use_errno=True)


class PortForward:
    """From 127.0.0.1 and the port of `address` inside, until closed. `init` is the sandbox's process 1."""

    def __init__(self, init: int, address: tuple[str, int]) -> None:
        self._address = address
        self._open: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._forward, sock=listener(init, address[1]))
        )
        self._thread = threading.Thread(target=self._serve, name="port forward", daemon=True)
        self._thread.start()

    def __enter__(self) -> PortForward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise SandboxError("the port forward of the sandbox could not be closed")

    def _serve(self) -> None:
        self._loop.run_forever()
        self._server.close()
        for task in self._open:
            task.cancel()
        self._loop.run_until_complete(_ended(self._open))
        self._loop.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._open.add(task)
        try:
            there, back = await asyncio.wait_for(asyncio.open_connection(*self._address), CONNECT_S)
            try:
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
            finally:
                back.close()
        except (OSError, asyncio.TimeoutError):  # noqa: UP041 - they differ in Python 3.9
            pass
        finally:
            writer.close()
            self._open.discard(task)


async def _ended(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the sender closes its end."""
    while piece := await reader.read(PIECE):
        writer.write(piece)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


def listener(init: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 inside. Raises SandboxError."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        user = Path(f"/proc/{init}/ns").stat().st_uid
        network = os.open(f"/proc/{init}/ns/net", os.O_RDONLY)
        owner = fcntl.ioctl(network, NS_GET_USERNS)
        try:
            child = os.fork()
            if child == 0:
                _send_listener(theirs, user, owner, network, port)
        finally:
            os.close(network)
            os.close(owner)
        ours.settimeout(CONNECT_S)
        theirs.close()
        try:
            reason, sockets, _, _ = socket.recv_fds(ours, 1000, 1)
        finally:
            os.waitpid(child, 0)
        if not sockets:
            raise SandboxError(f"port {port} cannot be opened in the sandbox: {reason.decode(errors='replace')}")
        return socket.socket(fileno=sockets[0])


def _send_listener(to: socket.socket, user: int, owner: int, network: int, port: int) -> None:
    """In the child, which ends here. The user that made the sandbox's namespaces may enter them. A container that root
    runs has no user namespace of its own."""
    try:
        shared = os.fstat(owner).st_ino == Path("/proc/self/ns/user").stat().st_ino
        if os.geteuid() == 0 and not shared:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        entered = ((network, CLONE_NEWNET),) if shared else ((owner, CLONE_NEWUSER), (network, CLONE_NEWNET))
        for namespace, kind in entered:
            if LIBC.setns(namespace, kind) != 0:
                raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
        made = socket.socket()
        made.bind(("127.0.0.1", port))
        made.listen(MAX_CONNECTIONS)
        socket.send_fds(to, [b"here"], [made.fileno()])
    except BaseException as error:
        to.sendall(str(error).encode()[:1000])
    finally:
        os._exit(0)
