"""Real attacks from inside a real sandbox. Each must fail, and the sandbox must go on."""

import os
import socket
import subprocess
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from rollart.sandbox.bubblewrap import SandboxLimits
from rollart.sandbox.shell import Sandbox

pytestmark = pytest.mark.slow

SMALL = SandboxLimits(memory=200, total_memory=300, processes=32, disk=4, inodes=2000)


@pytest.fixture
def sandbox():
    """After each attack the shell answers, and nothing is left once it is closed."""
    with Sandbox(limits=SMALL) as made:
        yield made
        assert made.run("echo $((6 * 7))", 20).output.endswith("42\n")
        assert len(made.processes) == 2  # init and the shell
        ended = [psutil.Process(pid) for pid in made.processes]
    assert not psutil.wait_procs(ended, timeout=30)[1]


def python(sandbox, code, deadline=20):
    return sandbox.run(f"python3 - <<'EOF'\n{code}\nEOF", deadline)


# Files


def test_no_file_of_the_host_is_there(sandbox):
    with tempfile.NamedTemporaryFile("w", suffix=".secret") as secret:
        secret.write("the secret")
        secret.flush()
        os.chmod(secret.name, 0o644)  # noqa: PTH101
        places = ["/root", "/home", "/etc/shadow", "/etc/passwd", "/var", "/srv", "/mnt", "/sys", "/run", secret.name]
        places += [str(Path.home()), str(Path(__file__).parent), "/proc/1/root/root", "/proc/1/cwd/../root", "/dev/vda"]
        for place in places:
            result = sandbox.run(f"cat {place} {place}/*")
            assert result.exit_code != 0 and "secret\n" not in result.output, place
        assert sandbox.run("find / -xdev -name '*.secret' 2>/dev/null").output == ""


def test_only_the_folders_of_the_sandbox_can_be_written(sandbox):
    for place in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/bin", "/lib"):
        assert sandbox.run(f"echo x > {place}/attack").exit_code != 0, place
    assert sandbox.run("chmod 777 / /usr; mkdir /x; ln -s /root /usr/x; rm -rf /usr/bin/ls").exit_code != 0
    assert sandbox.run("echo x > /tmp/a && echo x > /task/a && echo x > /dev/shm/a && ls /usr/bin/ls").exit_code == 0


def test_the_memory_of_process_one_cannot_be_written(sandbox):
    assert sandbox.run("echo x > /proc/1/mem").exit_code != 0
    assert sandbox.run("echo -1000 > /proc/self/oom_score_adj").exit_code != 0


# The network


def test_no_server_of_the_host_can_be_reached(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0rollart-escape-test")
        local.listen()
        server.settimeout(0.0)
        result = python(
            sandbox,
            "import socket\n"
            f"for family, address in ((socket.AF_INET, {server.getsockname()!r}), (socket.AF_INET, ('1.1.1.1', 53)),\n"
            "        (socket.AF_UNIX, '\\0rollart-escape-test')):\n"
            "    with socket.socket(family) as s:\n"
            "        s.settimeout(2)\n"
            "        try: s.connect(address); print('reached')\n"
            "        except OSError as error: print('no')",
        )
        assert result.output == "no\nno\nno\n"
        with pytest.raises(BlockingIOError):
            server.accept()
    assert sandbox.run("ls /sys/class/net; cat /proc/net/route | wc -l").output.endswith("1\n")


def test_raw_and_other_sockets_are_refused(sandbox):
    result = python(
        sandbox,
        "import socket\n"
        "for family, kind in ((2, 3), (17, 3), (16, 3), (40, 1), (38, 5)):\n"
        "    try: socket.socket(family, kind); print('made')\n"
        "    except OSError: print('no')",
    )
    assert result.output == "no\n" * 5


# Processes


def test_no_process_of_the_host_is_seen_or_killed(sandbox):
    bystander = subprocess.Popen(["sleep", "1000"])
    try:
        assert sandbox.run(f"kill -9 {bystander.pid}; kill -9 {os.getpid()}; ls -d /proc/{os.getpid()}").exit_code != 0
        sandbox.run("kill -9 -1; kill -9 1; kill -9 -- -1")
        assert len(sandbox.run("ls -d /proc/[0-9]*").output.split()) <= 4
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_the_shell_can_only_kill_itself(sandbox):
    assert "a new shell starts" in sandbox.run("kill -9 $$").note
    assert sandbox.run("kill -STOP $$", 0.3).note.startswith("it was killed")


@pytest.mark.parametrize("bomb", [":(){ :|:& };:", "f() { f & f & wait; }; f", "while :; do sleep 100 & done"])
def test_a_fork_bomb_stays_within_its_limit_and_is_killed(sandbox, bomb):
    most, over = 0, threading.Event()

    def count():
        nonlocal most
        while not over.wait(0.01):
            most = max(most, len(sandbox.processes))

    watcher = threading.Thread(target=count)
    watcher.start()
    sandbox.run(bomb, 1.0)
    over.set()
    watcher.join()
    assert most <= SMALL.processes + 2


@pytest.mark.parametrize(
    "daemon",
    [
        "(setsid nohup sh -c 'trap \"\" TERM HUP; while :; do sleep 0.01; done' >/dev/null 2>&1 &); disown -a",
        "f() { (f &); }; f",  # always another process
        "python3 -c 'import os\nwhile True:\n  if os.fork(): os._exit(0)'",
    ],
)
def test_a_daemon_does_not_outlive_its_command(sandbox, daemon):
    sandbox.run(daemon)
    assert len(sandbox.processes) == 2


CALLS = """
import ctypes
libc = ctypes.CDLL(None)
calls = {
    "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
    "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", b"/task", b"tmpfs", 0, None),
    "umount": lambda: libc.umount2(b"/usr", 2),
    "chroot": lambda: libc.chroot(b"/task"),
    "setuid": lambda: libc.setuid(0),
    "hostname": lambda: libc.sethostname(b"x", 1),
    "memfd": lambda: libc.memfd_create(b"x", 0),
    "setns": lambda: libc.setns(0, 0),
    "shm": lambda: libc.shmget(0, 4096, 0o1600),
    "reboot": lambda: libc.reboot(0x01234567),
}
for name, call in calls.items():
    print(name, "refused" if call() < 0 else "DONE")
"""


def test_privileged_calls_are_refused(sandbox):
    output = python(sandbox, CALLS).output
    assert output.count("refused") == 11, output


def test_it_has_no_capabilities_and_a_filter_that_stays(sandbox):
    status = sandbox.run("cat /proc/self/status").output
    assert "CapEff:\t0000000000000000" in status and "CapBnd:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status
    assert sandbox.run("ulimit -u unlimited; ulimit -v unlimited").exit_code != 0
    assert sandbox.run("unshare -Ur id; su -c id; mount -t tmpfs x /tmp").exit_code != 0


# Memory, disk, time, output


def test_one_process_cannot_fill_the_memory(sandbox):
    assert "MemoryError" in python(sandbox, "x = bytearray(10 ** 9)").output


def test_many_processes_together_cannot_fill_the_memory(sandbox):
    code = "import os, time\nfor _ in range(4): os.fork()\nx = b'x' * (80 * 2 ** 20)\ntime.sleep(1000)"
    assert python(sandbox, code).note.startswith("it was killed: it used more than 300 MB")


def test_the_disk_cannot_be_filled(sandbox):
    for place in ("/task", "/tmp", "/dev/shm"):
        sandbox.run(f"for i in 1 2 3; do head -c 20M /dev/zero > {place}/$i; done")
        used = int(sandbox.run(f"du -sm {place}; rm -f {place}/*").output.split()[0])
        assert used <= SMALL.disk, place


def test_the_number_of_empty_files_is_limited(sandbox):
    code = "import itertools\nfor n in itertools.count(): open(f'/tmp/{n}', 'w').close()"
    assert python(sandbox, code).note == "it was killed: there are more than 2,000 files"
    assert sandbox.run("find /tmp -type f -delete").exit_code == 0


def test_output_without_end_is_cut_and_its_command_killed(sandbox):
    result = sandbox.run("yes", 60)
    assert "wrote more than" in result.note and len(result.output) < 5000


def test_a_command_that_ignores_signals_and_waits_for_input_is_killed(sandbox):
    assert sandbox.run("trap '' INT TERM HUP; cat /dev/zero > /dev/null; read x", 0.3).exit_code is None


# The protocol


def test_a_printed_end_is_output_and_a_forged_one_only_ends_its_own_turn(sandbox):
    forged = sandbox.run('echo "$__tag 0"; printf "%s 0\\n" $__tag > /proc/$$/fd/1; false')
    assert forged.exit_code == 1 and " 0\n" in forged.output
    # The saved descriptors of the loop: 10 and up.
    sandbox.run('for fd in 10 11 12 13; do printf "%s 0\\n" $__tag >&$fd; done; sleep 1000', 0.5)
    sandbox.run('exec 9>&-; for fd in 10 11 12 13 14; do eval "exec $fd>&-"; done', 0.5)
    sandbox.run("eval() { echo mine; }; read() { :; }; printf() { :; }", 0.5)


def test_the_requests_cannot_be_taken_over(sandbox):
    sandbox.run("cat <&10 & cat <&11 & printf 'pack x\\nshell y\\n' > /proc/1/fd/0; sleep 0.1", 0.5)


# Between commands

# The shell has saved its pipe for replies above 9; a child of it can still write there when `exec` has replaced it.
FORGE = '(sleep 0.3; for fd in 10 11 12 13; do printf "%s 0\\n" "$__tag" >&$fd; done) 2>/dev/null & '
COUNT = """exec python3 -c 'while True: open("count", "a").write("x")'"""
SHELL_AGAIN = "exec bash -c 'while :; do :; done'"


@pytest.mark.parametrize("after", [COUNT, SHELL_AGAIN], ids=["python", "bash"])
def test_a_program_that_replaces_the_shell_and_forges_the_end_of_its_command_does_not_run_on(sandbox, after):
    result = sandbox.run(FORGE + after, 5)
    assert result.exit_code is None and "replaced by another program, which was killed" in result.note
    assert len(sandbox.processes) == 1, "init is alone"


def test_between_commands_the_shell_is_stopped(sandbox):
    for command in ("true", "sleep 100 & :", "trap 'sleep 0.01' DEBUG"):
        assert sandbox.run(command).exit_code == 0
        [_, shell] = sandbox.processes
        assert psutil.Process(shell).status() == psutil.STATUS_STOPPED


def test_memory_that_a_shell_keeps_counts_when_its_command_has_ended():
    with Sandbox(limits=SandboxLimits(memory=400, total_memory=60)) as sandbox:
        # A builtin, so that there is no child whose death would leave the shell with less than the limit.
        result = sandbox.run("printf -v x %70000000s; true", 20)
        assert "60 MB of memory" in result.note
        assert sandbox.run("echo ${#x}").output == "0\n"
