"""A bubblewrap sandbox: its namespaces, and the init process in them that starts everything else.

The invariants:
- Inside there is a read-only view of /usr, three small file systems in memory (the work folder, /tmp, /dev/shm), no
  network, and no process, user or file of the host. All else is read-only, /proc included.
- Init is process 1 of the sandbox, so nothing inside can kill it; when it ends, the kernel kills all others. It ends
  when we kill it, at the end of its requests, or when its parent dies.
- Nothing that comes from inside is trusted: replies are read without blocking, bounded, and only compared or shown.
- Started by root, it runs as an unused user id, one for each sandbox.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.sandbox import seccomp

WORK = "/task"
PROC = Path("/proc")
START_S, END_S = 30.0, 10.0
ENDED = "the sandbox ended; it may have been killed because the machine was short of memory"
FIRST_UID, NOBODY = 0x70000000, 65534
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
ETC = ("/etc/alternatives", "/etc/ld.so.cache")  # links to commands and libraries; nothing secret
VARIABLES = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
}
# Between two shells init reads requests: what to do, a tag for the reply, and the size of the archive.
# Signal -1 reaches all but itself at once: no process can escape by forking meanwhile.
INIT = """\
ulimit -c 0 -v {memory} -u {processes} -f {file} -n {files} -t {cpu} || exit 97
exec 9>&2 2>/dev/null
trap 'kill -STOP -1' USR1
while read -r what tag size; do
  case $what in
    unpack) head -c "$size" | (tar -xf -; code=$?; cat >/dev/null; exit $code); code=$?;;
    pack) tar -cSf - . >&9; code=$?;;
    shell)
      bash --norc --noprofile -c "$1" <&0 2>&9 9>&- &
      while wait $!; code=$?; [ -d /proc/$! ]; do :; done
      kill -KILL -1;;
    *) continue;;
  esac
  echo "$tag $code"
done
"""


class SandboxError(RuntimeError):
    """A sandbox could not be started, or broke. The message says what to do."""


@dataclass(frozen=True)
class SandboxLimits:
    """`memory` and `cpu_s` are per process, `total_memory` is for all together and checked while a command runs and
    when it has ended; `disk` is for the work folder, and as much again for /tmp. Megabytes and seconds."""

    memory: int = 512
    total_memory: int = 768
    processes: int = 64
    disk: int = 32
    inodes: int = 20_000
    open_files: int = 256
    cpu_s: int = 120


@dataclass(frozen=True)
class ExtraMounts:
    """`folders` of this machine, read-only at the same paths; `links` from / to folders in the work folder."""

    folders: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


NO_MOUNTS = ExtraMounts()


class Bubblewrap:
    """The running sandbox: `send` writes to its init, `replies` and `output` are read from; `init` is its pid."""

    def __init__(self, limits: SandboxLimits, shell: str, mounts: ExtraMounts = NO_MOUNTS) -> None:
        self.limits = limits
        self._mounts = mounts
        self._ours: list[int] = []  # file descriptors
        self.requests, self.replies, self.output, self.init = -1, -1, -1, 0
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(shell)
        except BaseException:
            self.close()
            raise

    def _start(self, shell: str) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxError(
                "the sandbox needs bubblewrap, which is not installed, and nothing runs without it; "
                "install it: `apt-get install bubblewrap` (dnf, pacman and apk have it too)"
            )
        try:
            program = seccomp.program()
        except ValueError as error:
            raise SandboxError(str(error)) from error
        with contextlib.ExitStack() as theirs, tempfile.TemporaryFile() as filters:
            filters.write(program)
            filters.seek(0)
            stdin, self.requests = self._pipe(theirs, ours=1)
            self.replies, stdout = self._pipe(theirs, ours=0)
            self.output, stderr = self._pipe(theirs, ours=0)
            info, info_in = self._pipe(theirs, ours=0)
            user = _user()
            for path in self._mounts.folders:
                _check_mount(Path(path), user)
            try:
                self._process = subprocess.Popen(
                    [bwrap, *arguments(self.limits, shell, filters.fileno(), info_in, self._mounts)],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    pass_fds=(filters.fileno(), info_in),
                    cwd="/",
                    user=user,
                    group=user,
                    extra_groups=None if user is None else [],
                )
            except OSError as error:
                raise SandboxError(f"{bwrap} cannot be started as user {user or os.geteuid()}: {error}") from error
        for descriptor in (self.requests, self.replies, self.output):
            os.set_blocking(descriptor, False)
        self.init = self._read_pid(info)
        # Killed first when the machine runs out of memory.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.init}/oom_score_adj").write_text("1000")

    def wait(self) -> None:
        """Until it runs; this one does when it is made. Raises SandboxError."""

    def _pipe(self, theirs: contextlib.ExitStack, ours: int) -> tuple[int, int]:
        ends = os.pipe()
        self._ours.append(ends[ours])
        theirs.callback(os.close, ends[1 - ours])
        return ends

    def _read_pid(self, info: int) -> int:
        text, deadline = b"", time.monotonic() + START_S
        while not text.rstrip().endswith(b"}"):
            piece = os.read(info, 4096) if ready([info], deadline - time.monotonic()) else b""
            if not piece:
                raise SandboxError(
                    f"bubblewrap could not start a sandbox ({self._last_output()}), and nothing runs without one; "
                    "it needs bubblewrap 0.8 or later and user namespaces: check `sysctl "
                    "kernel.unprivileged_userns_clone` (1), `kernel.apparmor_restrict_unprivileged_userns` (0) and "
                    "`user.max_user_namespaces` (not 0), and in a container allow them"
                )
            text += piece
        return int(json.loads(text)["child-pid"])

    def send(self, request: bytes, deadline: float) -> None:
        """Write all of it by `deadline` (of time.monotonic). Raises SandboxError."""
        rest = memoryview(request)
        while rest:
            if not ready([self.requests], deadline - time.monotonic(), select.POLLOUT):
                raise SandboxError("the sandbox does not read its requests")
            try:
                rest = rest[os.write(self.requests, rest[:65536]) :]
            except BrokenPipeError:
                raise SandboxError(f"the sandbox ended: {self._last_output()}") from None

    def _last_output(self) -> str:
        output = b""
        with contextlib.suppress(OSError):
            output = os.read(self.output, 2000)
        return output.decode(errors="replace").strip() or "no reason is known"

    def processes(self) -> list[int]:
        """All inside but init. One whose parent ends just now may be missed."""
        found = children(self.init)
        for pid in found:
            found += children(pid)
        return [pid for pid in found if not is_dead(pid)]

    def clear(self, shell: int) -> None:
        """Kill all inside but init and `shell`, which stays stopped. All are stopped meanwhile, so none is missed."""
        deadline = time.monotonic() + END_S
        self._signal(self.init, signal.SIGUSR1)
        while state(shell) not in "TZX":
            if time.monotonic() > deadline:
                raise SandboxError("the sandbox does not stop its processes")
            time.sleep(0.0001)
        while self._alive() > (not is_dead(shell)):
            for pid in self.processes():
                if pid != shell:
                    self._signal(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise SandboxError("processes in the sandbox could not be killed")

    def resume(self, shell: int) -> None:
        self._signal(shell, signal.SIGCONT)

    def _alive(self) -> int:
        """Processes inside but init: the sandbox's own /proc misses no stopped one, but its ids are not ours."""
        inside = Path(f"/proc/{self.init}/root/proc")
        try:
            return sum(not is_dead(int(entry.name), inside) for entry in inside.iterdir() if entry.name.isdecimal()) - 1
        except OSError:
            raise SandboxError(ENDED) from None

    def kill(self, pid: int) -> None:
        """If it is the shell, init kills all the others."""
        self._signal(pid, signal.SIGKILL)

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def used(self) -> tuple[int, int]:
        """Megabytes of its processes together, and the number of files in its folders."""
        pages = sum(resident_pages(pid) for pid in self.processes())
        root = f"/proc/{self.init}/root"
        inodes = 0
        for folder in (WORK, "/tmp", "/dev/shm"):
            with contextlib.suppress(OSError):
                about = os.statvfs(root + folder)
                inodes += about.f_files - about.f_ffree
        return pages * os.sysconf("SC_PAGESIZE") // 2**20, inodes

    def close(self) -> None:
        """End everything in it; its folders are deleted."""
        while self._ours:
            os.close(self._ours.pop())
        process, self._process = self._process, None
        if process is not None:
            # Init first: with it the kernel kills all that is inside, before any process is orphaned.
            for pid in (self.init, process.pid):
                if pid:
                    self._signal(pid, signal.SIGKILL)
            process.wait(END_S)


def arguments(limits: SandboxLimits, shell: str, filters: int, info: int, mounts: ExtraMounts = NO_MOUNTS) -> list[str]:
    """The arguments of bwrap. The order matters: a mount is made read-only after what is mounted in it."""
    disk = str(limits.disk * 2**20)
    system = [part for path in SYSTEM for part in _same_as_host(path)]
    etc = [part for path in ETC for part in ("--ro-bind-try", path, path)]
    folders = [part for path in mounts.folders for part in ("--ro-bind", path, path)]
    links = [part for name, folder in mounts.links for part in ("--symlink", f"{WORK}/{folder}", name)]
    variables = [part for name, value in VARIABLES.items() for part in ("--setenv", name, value)]
    init = INIT.format(
        memory=limits.memory * 1024,
        processes=limits.processes,
        file=limits.disk * 1024,
        files=limits.open_files,
        cpu=limits.cpu_s,
    )
    return [
        *("--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv", *variables),
        *("--ro-bind", "/usr", "/usr", *system, *etc, *links),
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *("--dev", "/dev", "--size", str(2**20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", disk, "--tmpfs", "/tmp", "--size", disk, "--tmpfs", WORK, *folders, "--remount-ro", "/"),
        *("--chdir", WORK, "--seccomp", str(filters), "--info-fd", str(info)),
        *("--", "bash", "--norc", "--noprofile", "-c", init, "init", shell),
    ]


def _same_as_host(path: str) -> list[str]:
    """/bin etc. are links into /usr on most systems, folders on others."""
    here = Path(path)
    if here.is_symlink():
        return ["--symlink", str(here.readlink()), path]
    return ["--ro-bind", path, path] if here.is_dir() else []


def _check_mount(path: Path, user: int | None) -> None:
    """Raises SandboxError for a folder that the sandbox's user cannot enter."""
    if not path.is_absolute() or not path.is_dir():
        raise SandboxError(f"the sandbox cannot mount {path}, which is not a folder")
    closed = [above for above in (path, *path.parents) if not above.stat().st_mode & 0o001]
    if closed and user is not None:
        raise SandboxError(
            f"the sandbox cannot mount {path}: its user is nobody and may not enter {closed[-1]}; move it to a folder "
            f"that all may enter, or run as another user than root"
        )


def _user() -> int | None:
    """For root, which has no process limits: an unused id. None: the user stays."""
    if os.geteuid() != 0:
        return None
    unused = FIRST_UID + os.getpid()
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= unused < first + count:
            return unused
    return NOBODY


# Reads /proc; a process may end at any moment.


def ready(descriptors: Sequence[int], seconds: float, what: int = select.POLLIN) -> set[int]:
    """Those that can be read, or written, within some time. `select` takes no descriptor above 1023."""
    poll = select.poll()
    for each in descriptors:
        poll.register(each, what)
    return {each for each, _ in poll.poll(max(0.0, seconds) * 1000)}


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def state(pid: int, proc: Path = PROC) -> str:
    """The kernel's letter; X once it is gone."""
    try:
        return (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def image(pid: int) -> tuple[str, ...]:
    """Changes when the process executes another program, or the same one again: its program, and where that lies in
    memory, which is random each time."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return str((PROC / str(pid) / "exe").readlink()), *fields[23:26]  # start of code, its end, start of stack
    except (OSError, IndexError):
        return ()


def is_dead(pid: int, proc: Path = PROC) -> bool:
    """Also while its parent has not reaped it yet."""
    return state(pid, proc) in "ZX"


def resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
