"""Real sandboxes. The attacks on them are in test_escape.py."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollart.sandbox.archive import archive
from rollart.sandbox.bubblewrap import SandboxError, SandboxLimits
from rollart.sandbox.shell import Sandbox, WorkTooBig


@pytest.fixture(scope="module")
def shared():
    with Sandbox() as sandbox:
        yield sandbox


def test_a_command_gives_its_output_and_its_exit_code(shared):
    result = shared.run("echo out; echo err >&2; exit_code() { return 7; }; exit_code")
    assert (result.output, result.exit_code, result.note) == ("out\nerr\n", 7, "")


def test_folder_variables_and_functions_survive_from_command_to_command(shared):
    shared.run("cd /tmp; x=3; twice() { echo $(($1 * 2)); }")
    assert shared.run("pwd; echo $x; twice 4").output == "/tmp\n3\n8\n"


def test_a_syntax_error_and_an_empty_command_are_only_reported(shared):
    assert shared.run("echo 'never closed").exit_code != 0
    assert shared.run("").exit_code == 0
    assert shared.run("if").exit_code != 0
    assert shared.run("echo still here").output == "still here\n"


def test_redirections_by_exec_last_for_their_command_only(shared):
    shared.run("exec >/dev/null 2>&1 </dev/zero")
    assert shared.run("echo seen; cat").output == "seen\n"


def test_a_shell_that_ends_is_replaced_and_the_files_stay(shared):
    shared.run("echo kept > /task/file; x=3")
    assert "ended with exit code 5; a new shell starts" in shared.run("exit 5").note
    assert shared.run("cat file; echo $x").output == "kept\n\n"


def test_a_command_that_takes_too_long_is_killed_and_the_shell_goes_on(shared):
    shared.run("x=alive")
    result = shared.run("echo before; sleep 1000", deadline=0.3)
    assert result.exit_code is None and result.output.startswith("before\n")
    assert result.note == "it was killed: it ran for more than 0.3 s"
    assert shared.run("echo $x").output == "alive\n"


def test_a_shell_that_loops_itself_is_replaced(shared):
    assert "a new shell starts" in shared.run("while :; do :; done", deadline=0.3).note
    assert shared.run("echo $((1 + 1))").output == "2\n"


def test_nothing_runs_on_in_the_background(shared):
    shared.run("sleep 1000 & (setsid sleep 1000 &) ; disown -a")
    assert len(shared.processes) == 2  # init and the shell
    assert shared.run("echo quiet").output == "quiet\n"


def test_a_command_that_is_too_long_is_not_run(shared):
    assert "it was not run" in shared.run("echo " + "x" * 100_000).note


def test_hostile_text_is_a_command_like_any_other(shared):
    for text in (
        "\0\0echo a\0",
        "echo \ud800",
        "echo '\x1b[2J\u202e'",
        "\r\n",
        "$(",
        "#" * 1000,
        "shell 1\n",
        "\n\npack x\n",
    ):
        shared.run(text)
    assert shared.run("echo fine").output.endswith("fine\n")


def test_files_go_in_and_come_out():
    with Sandbox(archive({"a/b.txt": "text\n", "run.sh": "echo ran\n"})) as sandbox:
        assert sandbox.run("cat a/b.txt; ./run.sh; echo new > c").output == "text\nran\n"
        packed = sandbox.pack()
        assert sandbox.run("ls").output == "a\nc\nrun.sh\n"
    with Sandbox(packed) as sandbox:
        assert sandbox.run("cat c").output == "new\n"


def test_a_folder_that_cannot_be_read_is_not_packed():
    with Sandbox() as sandbox:
        sandbox.run("mkdir secret; chmod 0 secret")
        with pytest.raises(WorkTooBig):
            sandbox.pack()


def test_files_that_do_not_fit_are_refused():
    with pytest.raises(SandboxError, match="could not be unpacked in the sandbox"):
        Sandbox(archive({"big": "x" * 3 * 2**20}), SandboxLimits(disk=1))


def test_without_bubblewrap_it_refuses_and_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        Sandbox()


def test_where_namespaces_are_forbidden_it_refuses_and_says_what_to_allow(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        fake = Path(folder) / "bwrap"
        fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
        for path in (fake, Path(folder)):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(SandboxError, match=r"No permissions to create a new namespace.*user namespaces"):
            Sandbox()
        fake.chmod(0)
        fake.write_bytes(b"")
        fake.chmod(0o755)
        with pytest.raises(SandboxError, match="cannot be started"):
            Sandbox()


def test_it_dies_with_its_owner_however_that_ends():
    script = (
        "import os, signal, time; from rollart.sandbox.shell import Sandbox; s = Sandbox()\n"
        "s._bwrap.resume(s._shell); s._bwrap.send(b'tag\\nsleep 1000\\0', time.monotonic() + 20)\n"
        "while len(found := s.processes) < 3: pass\n"
        "print(*found, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    owner = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in owner.stdout.split()]
    assert len(pids) == 3  # init, the shell and what it runs
    end = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))


def open_files():
    """Numbers and targets. Garbage of other tests may close some of them at any time."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this listing
            found.add((path.name, path.readlink()))
    return found


def test_closing_leaves_no_process_and_no_open_file():
    before = open_files()
    sandbox = Sandbox()
    alive = [psutil.Process(pid) for pid in sandbox.processes]
    sandbox.close()
    sandbox.close()
    assert not psutil.wait_procs(alive, timeout=30)[1]
    assert not open_files() - before
