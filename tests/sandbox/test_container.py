"""The sandbox in a real container: an image made here from a few programs of this machine, run by podman."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from rollart.envs.terminal import Terminal
from rollart.sandbox.archive import archive
from rollart.sandbox.bubblewrap import SandboxError, SandboxLimits, is_dead
from rollart.sandbox.container import Container
from rollart.sandbox.port_forward import PortForward
from rollart.sandbox.shell import Sandbox
from rollart.sandbox.start import SandboxStarter
from tests.support.podman import PROGRAMS, podman_image

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with podman_image(tmp_path_factory.mktemp("podman")) as name:
        yield name


def test_commands_run_in_the_image_with_their_files_and_state(image: str) -> None:
    with Sandbox(archive({"a.txt": "hello\n"}), image=image) as sandbox:
        assert sandbox.run("cat a.txt; x=3; id -u", 10).output == "hello\n1000\n"
        assert sandbox.run("echo $x", 10).output == "3\n"
        assert set(sandbox.run("ls /bin", 10).output.split()) == {*PROGRAMS, "sh"}  # not those of this machine
        assert sandbox.run("exit_code() { return 7; }; exit_code", 10).exit_code == 7


def test_its_files_go_out_and_into_another(image: str) -> None:
    with Sandbox(archive({"d/a.txt": "hello\n"}), image=image) as sandbox:
        work = sandbox.pack()
    with Sandbox(image=image) as sandbox:
        assert sandbox.unpack(work) and sandbox.run("cat d/a.txt", 10).output == "hello\n"


def test_it_can_neither_write_to_the_image_nor_reach_a_network(image: str) -> None:
    with Sandbox(image=image) as sandbox:
        assert sandbox.run("touch /bin/x", 10).exit_code != 0
        assert sandbox.run("touch here /tmp/there && echo ok", 10).output == "ok\n"
        assert sandbox.run("exec 3<>/dev/tcp/127.0.0.1/80", 10).exit_code != 0
        interfaces = [
            line.partition(":")[0].strip() for line in sandbox.run("cat /proc/net/dev", 10).output.splitlines()
        ]
        assert interfaces[2:] == ["lo"]


def test_its_one_connection_is_the_port_that_is_forwarded(image: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        Sandbox(image=image) as sandbox,
        PortForward(sandbox.processes[0], server.getsockname()),
    ):
        answering = threading.Thread(target=lambda: server.accept()[0].sendall(b"hello"))
        answering.start()
        said = sandbox.run(f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]} && head -c 5 <&3", 10)
        answering.join(10)
        assert said.output == "hello"


def test_the_terminal_environment_plays_in_an_image(image: str) -> None:
    terminal = Terminal(kinds=["find"], image=image)
    terminal.reset(0)
    assert set(PROGRAMS) < set(terminal.step("```bash\nls /bin\n```")["messages"].split())
    terminal.close()


def test_a_command_that_takes_too_long_is_killed_and_the_sandbox_goes_on(image: str) -> None:
    with Sandbox(image=image) as sandbox:
        ended = sandbox.run("sleep 60", 0.5)
        assert ended.exit_code is None and ended.note
        assert sandbox.run("sleep 60 & echo left", 10).output == "left\n"
        assert sandbox.run("echo on", 10).output == "on\n"


def test_nothing_is_left_when_it_is_closed(image: str) -> None:
    container = Container(image, limits=SandboxLimits(), shell="sleep 60")
    container.wait()
    init, name = container.init, container._name
    assert not is_dead(init)
    container.close()
    listed = subprocess.run(["podman", "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True)
    assert is_dead(init) and name not in listed.stdout


def test_the_next_container_is_started_ahead_and_none_is_left(image: str) -> None:
    starter = SandboxStarter(image=image)
    with starter.start(archive({"a.txt": "first\n"})) as first:
        assert first.run("cat a.txt; touch mark", 10).output == "first\n"
    spare = starter._spare
    assert spare is not None and spare.is_running
    with starter.start() as second:
        assert second.run("ls", 10).output == "" and starter._spare is not spare
        spare.kill(spare.init)
        wait_until_dead(spare.init)
        with pytest.raises(SandboxError):
            second.run("ls", 10)
    dead = starter._spare
    assert dead is not None
    dead.close()
    with starter.start() as third:  # one that died ahead is replaced
        assert third.run("echo on", 10).output == "on\n"
    starter.close()
    listed = subprocess.run(["podman", "ps", "--all", "--quiet"], capture_output=True, text=True)
    assert starter._spare is None and listed.stdout == ""


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while not is_dead(pid) and time.monotonic() < deadline:
        os.sched_yield()
    assert is_dead(pid)


def test_it_ends_with_its_owner(image: str) -> None:
    """A killed owner closes its end of the requests, and init ends."""
    container = Container(image, limits=SandboxLimits(), shell="sleep 60")
    try:
        container.wait()
        while container._ours:
            os.close(container._ours.pop())
        assert container._process is not None
        container._process.kill()
        wait_until_dead(container.init)
    finally:
        container.close()


def test_an_image_that_is_not_there_is_one_sentence(image: str) -> None:
    with pytest.raises(SandboxError, match="could not run the image localhost/no-such"):
        Sandbox(image="localhost/no-such:1")
