"""The one network connection of a sandbox."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollart.sandbox.bubblewrap import SandboxLimits
from rollart.sandbox.port_forward import PortForward
from rollart.sandbox.shell import Sandbox

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
ASK = "exec 3<>/dev/tcp/127.0.0.1/{port} && printf %s {word} >&3 && head -c {size} <&3"


@contextmanager
def echoing() -> Iterator[int]:
    """A server of this machine, on its loopback, that echoes what it is sent; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while piece := connection.recv(65536):
                connection.sendall(piece)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_forwarded_port_reaches_one_address_and_no_other() -> None:
    with (
        echoing() as port,
        echoing() as other,
        Sandbox() as sandbox,
        PortForward(sandbox.processes[0], ("127.0.0.1", port)),
    ):
        said = sandbox.run(ASK.format(port=port, word="hello", size=5))
        assert (said.output, said.exit_code) == ("hello", 0)
        refused = sandbox.run(ASK.format(port=other, word="hello", size=5))
        assert "Connection refused" in refused.output and refused.exit_code != 0


def test_many_connections_are_kept_apart() -> None:
    limits = SandboxLimits(processes=256)
    with echoing() as port, Sandbox(limits=limits) as sandbox, PortForward(sandbox.processes[0], ("127.0.0.1", port)):
        one = ASK.format(port=port, word="word$number", size=6)
        said = sandbox.run(f"for number in {{10..49}}; do ( echo $({one}) ) & done; wait")
        assert sorted(said.output.split()) == [f"word{number}" for number in range(10, 50)]


def test_much_data_passes_through_and_so_does_its_end() -> None:
    with echoing() as port, Sandbox() as sandbox, PortForward(sandbox.processes[0], ("127.0.0.1", port)):
        said = sandbox.run(
            f"exec 3<>/dev/tcp/127.0.0.1/{port}; head -c 3000000 /dev/zero >&3 & head -c 3000000 <&3 | wc -c"
        )
        assert said.output.strip() == "3000000"


def test_a_closed_forward_cannot_be_used() -> None:
    with echoing() as port, Sandbox() as sandbox:
        with PortForward(sandbox.processes[0], ("127.0.0.1", port)):
            pass
        said = sandbox.run(ASK.format(port=port, word="hello", size=5))
        assert "Connection refused" in said.output


def test_a_connection_to_no_server_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Sandbox() as sandbox, PortForward(sandbox.processes[0], ("127.0.0.1", port)):
        said = sandbox.run(ASK.format(port=port, word="hello", size=5))
        assert said.output.replace("hello", "") == said.output
