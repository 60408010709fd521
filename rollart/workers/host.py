"""The host: imports foreign code once, then forks one process for each connection.

Run by path (`python host.py`) with any Python from 3.9 on; it needs the standard library and the modules that it is
to import. It reads its spec, one JSON line, from stdin, and writes one line to stdout: where it listens, or the error.

With arguments it serves environments to remote runs until SIGTERM or Ctrl-C (`rollart envs serve`): what is imported
at the start is shared by all processes, anything else that this Python can import is imported by each process.

The invariants:
- A connection is a process and a process is a process group. When the connection closes, the group is killed; when the
  process ends, whatever it started is killed and the connection's last line is `{"ended": reason}`.
- It listens on a Unix socket, which only our user can open, or on a port, where the first line must be the key. Nothing
  is forked before that was read (`callers`).
- There are at most `processes` processes, each within its limits (`process_limits`); what they run is in `call_loop`.
- The host lives as long as its stdin. It ends after the last process, and leaves none behind: descendants that left
  their process group come back to it (it is their subreaper) and are killed. Processes die with a killed host.
- Only the host's own loop runs in the host; foreign code runs there while it is imported, never later.
- Nothing that foreign code prints reaches a connection: stdout is stderr everywhere, stdin is empty in the processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

PACKAGE = str(Path(__file__).resolve().parent.parent)


def make_rollart_importable() -> None:
    """Let a Python that does not have rollart import its modules, but nothing else of what is installed with it."""
    init = Path(PACKAGE) / "__init__.py"
    spec = importlib.util.spec_from_file_location("rollart", init, submodule_search_locations=[PACKAGE])
    if spec is None or spec.loader is None:
        raise ImportError(f"{PACKAGE} is not a package")
    package = importlib.util.module_from_spec(spec)
    sys.modules["rollart"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    make_rollart_importable()

from rollart.workers.call_loop import CallLoop, describe, encode  # noqa: E402
from rollart.workers.callers import Callers  # noqa: E402
from rollart.workers.process_limits import ProcessLimits, Watch  # noqa: E402

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # Linux
END_S = 5.0  # until killed processes are gone
ACCEPT_PAUSE_S = 0.05  # after a connection that could not be accepted
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # threads do not survive a fork
LIBC = ctypes.CDLL(None)
KEY = "ROLLART_WORKER_KEY"  # environment variable
NO_KEY = f"set {KEY} to a secret that runs must send: without one, anyone who reaches the port could run code here"
ENVIRONMENT = "{rollart}/envs/process_entry.py:EnvironmentProcess"


def prctl(option: int, value: int) -> None:
    LIBC.prctl(option, value, 0, 0, 0)


def resolve(path: str) -> Any:
    """`package.module:name`, or `/a/file.py:name`, where `{rollart}` is the folder of our package on this machine."""
    module, _, name = path.replace("{rollart}", PACKAGE).rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("_rollart_" + Path(module).stem, module)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module} is not a Python file")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


@dataclass(frozen=True)
class HostSettings:
    """`limit` is the size of a message in bytes; without a `key`, the socket is protected by its folder."""

    limit: int
    key: str
    processes: int
    limits: ProcessLimits


class Host:
    def __init__(self, listener: socket.socket, target: Any, settings: HostSettings) -> None:
        self._listener = listener
        self._target = target
        self._settings = settings
        self._connections: dict[int, socket.socket] = {}  # by process id
        self._pids: dict[int, int] = {}  # process id by file descriptor
        self._watch = Watch(settings.limits)
        self._check_at = 0.0
        self._poll = select.poll()
        self._callers = Callers(settings.key, self._poll)
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._wake, self._wake_in = os.pipe()
        for end in (self._wake, self._wake_in):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wake_in, warn_on_full_buffer=False)
        self._ended = False
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signal)

    def _signal(self, number: int, frame: Any) -> None:
        self._ended = self._ended or number != signal.SIGCHLD

    def serve(self) -> None:
        for descriptor in (self._listener.fileno(), 0, self._wake):
            self._poll.register(descriptor, select.POLLIN)
        while not self._ended:
            ready = {descriptor for descriptor, _ in self._poll.poll(self._wait_ms())}
            for descriptor in ready & self._pids.keys():
                self._kill(self._pids[descriptor])
            for descriptor in ready & self._callers.descriptors:
                if (connection := self._callers.read(descriptor)) is not None:
                    self._fork(connection)
            self._check()
            if self._wake in ready:
                self._reap()
            if 0 in ready:
                self._ended = self._ended or not os.read(0, 4096)
            if self._listener.fileno() in ready:
                self._accept()  # last: it may get a descriptor that was closed just now
        self._end()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the client is gone already, or too many files are open until a process ends
            print(f"a connection could not be accepted: {error}", file=sys.stderr)
            time.sleep(ACCEPT_PAUSE_S)
            return
        if not self._settings.key:
            self._fork(connection)
        else:
            self._callers.add(connection)

    def _wait_ms(self) -> float | None:
        """Until something must be checked, whatever happens."""
        until = min(self._callers.deadline, self._check_at if self._connections else float("inf"))
        return None if until == float("inf") else 1000 * max(0.0, until - time.monotonic()) + 1

    def _check(self) -> None:
        self._callers.expire()
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + self._watch.period(len(self._connections))
        for pid in self._connections:
            if self._watch.broken(pid):
                self._signal_group(pid)
        self._watch.trim_log()

    def _fork(self, connection: socket.socket) -> None:
        host = os.getpid()
        try:
            if len(self._connections) >= self._settings.processes:
                raise OSError(f"the host runs {len(self._connections)} processes, as many as it may")
            pid = os.fork()
        except OSError as error:
            self._send(connection, encode({"ended": f"could not be started: {error}"}))
            connection.close()
            return
        if pid == 0:
            self._become_process(connection, host)
        self._watch.add(pid)
        self._connections[pid] = connection
        self._pids[connection.fileno()] = pid
        # Only the hang-up: the process reads the requests on the shared connection.
        self._poll.register(connection.fileno(), select.POLLRDHUP)
        self._send(connection, encode({"pid": pid}))

    def _become_process(self, connection: socket.socket, host: int) -> NoReturn:
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            if os.getppid() != host:  # it died before the death signal was set
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            for other in (self._listener, *self._connections.values(), *self._callers.connections):
                other.close()
            os.close(self._wake)
            os.close(self._wake_in)
            os.dup2(self._nothing, 0)
            os.close(self._nothing)
            self._settings.limits.enter()
            CallLoop(connection, self._target, self._settings.limit, self._settings.limits).run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _send(self, connection: socket.socket, line: bytes) -> None:
        # A client that does not read must not stop the host; it sees the closed connection all the same.
        with contextlib.suppress(OSError):
            connection.send(line, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _kill(self, pid: int) -> None:
        # The process is not reaped yet, so its id was not reused.
        self._poll.unregister(self._connections[pid].fileno())
        self._pids.pop(self._connections[pid].fileno())
        self._signal_group(pid)

    @staticmethod
    def _signal_group(pid: int) -> None:
        for send in (os.killpg, os.kill):  # it may not have its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while True:
            try:
                # Not reaped yet, so that the id of its group is not reused.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                break
            if ended.si_pid in self._connections:
                self._signal_group(ended.si_pid)
                _, status = os.waitpid(ended.si_pid, 0)
                self._report_end(ended.si_pid, status)
            else:
                os.waitpid(ended.si_pid, 0)
        for stray in self._strays():
            self._signal_group(stray)

    def _report_end(self, pid: int, status: int) -> None:
        connection = self._connections.pop(pid)
        if self._pids.pop(connection.fileno(), None):
            self._poll.unregister(connection.fileno())
        reason = self._watch.ended(pid)
        if reason:
            pass
        elif os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            reason = f"was killed by signal {number} ({signal.strsignal(number)})"
        else:
            reason = f"ended by itself with exit code {os.WEXITSTATUS(status)}"
        self._send(connection, b"\n" + encode({"ended": reason}))
        connection.close()

    def _strays(self) -> list[int]:
        """Descendants of ended processes that had left their process group: they are our children now."""
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        except OSError:  # not on this system
            return []
        return [int(pid) for pid in children if int(pid) not in self._connections]

    def _end(self) -> None:
        self._listener.close()
        for pid in list(self._connections):
            self._signal_group(pid)
        deadline = time.monotonic() + END_S
        while (self._connections or self._strays()) and time.monotonic() < deadline:
            select.select([self._wake], [], [], 0.05)
            self._reap()


def prepare(spec: dict[str, Any]) -> Any:
    """Import everything and return the target. Raises ImportError, which names the import path."""
    sys.path[:] = dict.fromkeys([*spec["path"], *sys.path[1:]])  # without the folder of this file
    target = None
    for path in [*spec["imports"], spec["target"]]:
        try:
            target = resolve(path)
        except BaseException as error:  # a module may even call sys.exit
            raise ImportError(f"`{path}` cannot be imported: {describe(error)}") from error
    for path in spec.get("preload", ()):
        with contextlib.suppress(BaseException):  # whoever needs it reports why
            resolve(path)
    gc.collect()
    gc.freeze()  # a collection in a process would otherwise copy every shared page
    return target


def listen(spec: dict[str, Any]) -> socket.socket:
    if spec["socket"]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(spec["socket"])
    else:
        if not spec["key"]:
            raise ValueError("a host that listens on a port needs a key: others can reach it there")
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for level, option in (
            (socket.SOL_SOCKET, socket.SO_REUSEADDR),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY),
        ):
            listener.setsockopt(level, option, 1)  # connections inherit it
        listener.bind((spec["bind"], spec.get("port", 0)))
    listener.listen(128)
    return listener


def serve_environments() -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Serve environments to remote runs.", epilog=f"{KEY} is the key.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=7070, help="0: any that is free")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE:NAME")
    parser.add_argument("--limit", type=int, default=4_000_000, help="bytes of one message")
    parser.add_argument("--processes", type=int, default=1024, help="most environments at the same time")
    parser.add_argument("--limits", type=json.loads, default={}, help="of each environment, as JSON; see ProcessLimits")
    options = parser.parse_args()
    key = os.environ.pop(KEY, "")  # hidden from the environments
    if not key:
        sys.exit(NO_KEY)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        target = prepare({"path": [str(Path.cwd())], "imports": [ENVIRONMENT, *options.imports], "target": ENVIRONMENT})
        listener = listen({"socket": None, "key": key, "bind": options.host, "port": options.port})
    except (ImportError, OSError) as error:
        sys.exit(str(error))
    address, port = listener.getsockname()
    print(f"serving environments at tcp://{address}:{port}", flush=True)
    # A host lives as long as its standard input; this one until a signal.
    forever, _ = os.pipe()
    os.dup2(forever, 0)
    os.dup2(2, 1)
    limits = ProcessLimits(**options.limits)
    Host(listener, target, HostSettings(options.limit, key, options.processes, limits)).serve()


def serve_controller() -> None:
    wire = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    line = b""
    while not line.endswith(b"\n"):  # unbuffered: what follows belongs to the loop
        piece = os.read(0, 65536)
        if not piece:
            return
        line += piece
    spec = json.loads(line)
    try:
        target = prepare(spec)
    except ImportError as error:
        wire.write(encode({"error": str(error)}))
        return
    listener = listen(spec)
    wire.write(encode({"ready": os.getpid(), "address": listener.getsockname()}))
    wire.close()
    try:
        key, limits = "" if spec["socket"] else spec["key"], ProcessLimits(**spec["limits"])
        Host(listener, target, HostSettings(spec["limit"], key, spec["processes"], limits)).serve()
    finally:
        if spec["socket"]:
            Path(spec["socket"]).unlink(missing_ok=True)
            Path(spec["socket"]).parent.rmdir()


if __name__ == "__main__":
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")
    serve_environments() if sys.argv[1:] else serve_controller()
