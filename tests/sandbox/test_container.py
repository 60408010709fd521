"""The sandbox in a real container: an image made here from a few programs of this machine, run by podman."""

import os
import shutil
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollart.envs.terminal import Terminal
from rollart.sandbox.archive import archive
from rollart.sandbox.bubblewrap import SandboxError, SandboxLimits, is_dead
from rollart.sandbox.container import Container
from rollart.sandbox.port_forward import PortForward
from rollart.sandbox.shell import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
IMAGE = "localhost/rollart-test:1"
PROGRAMS = ("bash", "cat", "head", "id", "ls", "sleep", "tar", "touch")
ENGINE = """\
[engine]
runtime = "{runtime}"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
"""
STORAGE = '[storage]\ndriver = "vfs"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Podman with a store of its own, that nothing else uses, and an image in it; no registry is asked."""
    runtime = shutil.which("runc") or shutil.which("crun")
    if shutil.which("podman") is None or runtime is None or os.geteuid() != 0:
        pytest.skip("needs podman, runc or crun, and root")
    folder = tmp_path_factory.mktemp("podman")
    with pytest.MonkeyPatch.context() as patch:
        for name, text in (("CONTAINERS_CONF", ENGINE), ("CONTAINERS_STORAGE_CONF", STORAGE)):
            file = folder / name.lower()
            file.write_text(text.format(runtime=runtime, folder=folder))
            patch.setenv(name, str(file))
        made = subprocess.run(["podman", "import", root_archive(folder), IMAGE], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        tried = subprocess.run(["podman", "run", "--rm", "--network=none", IMAGE, "id"], capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"podman cannot run containers here: {tried.stderr.strip()}")
        yield IMAGE
        subprocess.run(["podman", "system", "reset", "--force"], capture_output=True, timeout=60)


def root_archive(folder: Path) -> str:
    """A root file system of a few programs and the libraries that they load."""
    wanted = {"/bin/sh": shutil.which("bash")}
    for program in PROGRAMS:
        path = os.path.realpath(str(shutil.which(program)))
        wanted[f"/bin/{program}"] = path
        loaded = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        wanted |= {word: os.path.realpath(word) for word in loaded.split() if word.startswith("/")}
    with tarfile.open(folder / "root.tar", "w") as tar:
        for name in ("tmp", "etc", "task", "proc", "dev", "sys"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        for name, source in wanted.items():
            tar.add(str(source), name.lstrip("/"))
    return str(folder / "root.tar")


def test_commands_run_in_the_image_with_their_files_and_state(image: str) -> None:
    with Sandbox(archive({"a.txt": "hello\n"}), image=image) as sandbox:
        assert sandbox.run("cat a.txt; x=3; id -u", 10).output == "hello\n1000\n"
        assert sandbox.run("echo $x", 10).output == "3\n"
        assert set(sandbox.run("ls /bin", 10).output.split()) == {*PROGRAMS, "sh"}  # not those of this machine
        assert sandbox.run("exit_code() { return 7; }; exit_code", 10).exit_code == 7


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
    init, name = container.init, container._name
    assert not is_dead(init)
    container.close()
    listed = subprocess.run(["podman", "ps", "--all", "--format", "{{.Names}}"], capture_output=True, text=True)
    assert is_dead(init) and name not in listed.stdout


def test_it_ends_with_its_owner(image: str) -> None:
    """A killed owner closes its end of the requests, and init ends."""
    container = Container(image, limits=SandboxLimits(), shell="sleep 60")
    try:
        while container._ours:
            os.close(container._ours.pop())
        assert container._process is not None
        container._process.kill()
        deadline = time.monotonic() + 20
        while not is_dead(container.init) and time.monotonic() < deadline:
            os.sched_yield()
        assert is_dead(container.init)
    finally:
        container.close()


def test_an_image_that_is_not_there_is_one_sentence(image: str) -> None:
    with pytest.raises(SandboxError, match="could not run the image localhost/no-such"):
        Sandbox(image="localhost/no-such:1")
