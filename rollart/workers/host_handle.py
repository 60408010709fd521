"""The controller's side of one host: starts it, forks processes in it, ends it.

The invariants:
- A host on this machine is reached through a Unix socket in a folder of its own, one on another machine through a port,
  with the launcher's key as the first line.
- A host that ended, or that cannot be reached, takes every process with it: they are lost as soon as that is known, not
  when their connections notice.
"""

import asyncio
import resource
import shutil
import sys
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollart.config import ProcessLimitsConfig
from rollart.core.errors import ServiceError
from rollart.launch.launcher import NOWHERE, Command, Launcher, ResourceRequest, ServiceHandle, relaunch
from rollart.workers.worker_process import HOST_LOST, ProcessLost, WorkerProcess

MAX_FORKS = 32  # connections that wait for their fork at once, within every system's backlog
OPEN_FILES = 16_384
MAX_PROCESSES = 8192  # of one host; pools have far lower limits of their own


@dataclass(frozen=True, slots=True)
class HostLocation:
    """Where a host may run."""

    launcher: Launcher
    request: ResourceRequest


@dataclass(frozen=True, slots=True)
class HostSpec:
    """`target` is constructed once in each process, its methods are the calls; `imports` are imported in the host, and
    `preload` if that is possible.

    All are `package.module:name` or `/a/file.py:name`. `python` is the interpreter, None: the node's own. `path` is
    prepended to its `sys.path`; None: that of this process if it is the same Python, otherwise the working folder.
    `pass_env` are the variables of its node that it gets, besides the harmless ones; `limits` hold for each process.
    """

    target: str
    imports: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    python: str | None = None
    path: tuple[str, ...] | None = None
    message_bytes: int = 4_000_000
    start_deadline: float = 60.0
    log: Path | None = None
    name: str = "worker host"
    pass_env: tuple[str, ...] = ()
    limits: ProcessLimitsConfig = field(default_factory=ProcessLimitsConfig)

    def command(self, socket: Path | None) -> Command:
        path = self.path
        if path is None:
            same = self.python in (None, sys.executable)
            path = tuple(str(Path(entry).absolute()) for entry in (sys.path if same else [""]))
        spec: dict[str, Any] = {"target": self.target, "imports": self.imports, "preload": self.preload, "path": path}
        spec |= {"limit": self.message_bytes, "processes": MAX_PROCESSES, "limits": self.limits.model_dump()}
        return Command(
            name=self.name,
            argv=("{rollart}/workers/host.py",),
            spec={**spec, "socket": str(socket) if socket else None},
            log=self.log or NOWHERE,
            python=self.python,
            pass_env=self.pass_env,
            start_deadline=self.start_deadline,
        )


class HostHandle:
    """One run of a host, from `start` to `stop`; `running` turns false when it ended or cannot be reached."""

    def __init__(self, spec: HostSpec, location: HostLocation) -> None:
        self._spec = spec
        self._location = location
        self._folder: Path | None = None
        self._address: str | tuple[str, int] = ""
        self._service: ServiceHandle | None = None
        self._forking = asyncio.Semaphore(MAX_FORKS)
        self._processes: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
        self._unreachable = False  # known before the launcher reports that the host ended
        self.ended: asyncio.Task[str]

    @property
    def running(self) -> bool:
        return self._service is not None and not self.ended.done() and not self._unreachable

    @property
    def service(self) -> ServiceHandle:
        if self._service is None:
            raise RuntimeError("the host has not started")
        return self._service

    async def start(self, replaces: ServiceHandle | None = None) -> None:
        """Raises ServiceError, for example when something cannot be imported."""
        if sys.platform != "linux":
            raise ServiceError("environments and rewards run in processes that need Linux; use a Linux machine or VM")
        raise_open_file_limit()
        launcher, request = self._location.launcher, self._location.request
        self._folder = Path(tempfile.mkdtemp(prefix="rollart-")) if launcher.here else None
        command = self._spec.command(self._folder and self._folder / "socket")
        try:
            if replaces is None:
                self._service = await launcher.launch(command, request)
            else:
                self._service = await relaunch(launcher, command, request, replaces)
        except BaseException:
            self._remove_folder()
            raise
        address = self._service.answer["address"]
        self._address = address if isinstance(address, str) else (address[0], address[1])
        self.ended = asyncio.create_task(self._watch(self._service))

    async def _watch(self, service: ServiceHandle) -> str:
        reason = await service.wait()
        for process in list(self._processes):
            process.kill(f"{HOST_LOST}: {reason.splitlines()[0]}")
        return reason

    async def fork(self) -> WorkerProcess:
        """Raises ProcessLost."""
        process = WorkerProcess(self._spec.message_bytes)
        self._processes.add(process)
        deadline = self._spec.start_deadline
        try:
            async with asyncio.timeout(deadline), self._forking:
                await process.connect(self._address, self._location.launcher.key)
        except TimeoutError:
            self.kill()  # a host that cannot fork in time is useless
            process.kill(f"the host started no process within {deadline:g} s and was killed")
            raise ProcessLost(process.lost) from None
        except OSError as error:
            self._unreachable = True
            process.kill(f"the host cannot be reached: {error}")
            raise ProcessLost(process.lost) from error
        except ProcessLost:
            self._unreachable = self._unreachable or process.lost.startswith(HOST_LOST)
            raise
        except BaseException:
            process.kill("its start was cancelled")
            raise
        return process

    def kill(self) -> None:
        self._unreachable = True
        if self._service is not None:
            self._service.kill()

    async def stop(self) -> None:
        """End the host and all that its processes started, within a deadline."""
        if self._service is not None:
            await self._service.stop()
            await self.ended
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def raise_open_file_limit() -> None:
    """A process is an open file here and in its host; the usual limit of 1,024 is for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))
