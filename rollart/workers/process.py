"""The controller's side of one host: its life, and the way to its slots.

The invariants:
- A host on this machine is reached through a Unix socket in a folder of its own, one elsewhere through a port, with the
  launcher's key as the first line.
- A host that ended, or that cannot be reached, takes every slot with it: they are lost as soon as that is known, not
  when their connections notice.
"""

import asyncio
import resource
import shutil
import sys
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.core.errors import ServiceError
from rollart.launch.keepalive import enable_keepalive
from rollart.launch.launcher import NOWHERE, Command, Launcher, ResourceRequest, ServiceHandle, relaunch
from rollart.workers.slot import HOST_LOST, Slot, SlotLost

STARTING = 32  # connections that wait for their fork at once, within every system's backlog
MANY_FILES = 16_384


@dataclass(frozen=True, slots=True)
class Place:
    """Where a host may run."""

    launcher: Launcher
    request: ResourceRequest


@dataclass(frozen=True, slots=True)
class HostSpec:
    """`target` is made once in each slot, its methods are the calls; `imports` are made once, in the host.

    Both are `package.module:name` or `/a/file.py:name`. `python` is the interpreter, None: the node's own. `path` comes
    before what it has by itself; None: where this process finds its modules if it is the same Python, otherwise the
    working folder.
    """

    target: str
    imports: tuple[str, ...] = ()
    python: str | None = None
    path: tuple[str, ...] | None = None
    message_bytes: int = 4_000_000
    start_deadline: float = 60.0
    log: Path | None = None
    name: str = "worker host"

    def command(self, socket: Path | None) -> Command:
        path = self.path
        if path is None:
            same = self.python in (None, sys.executable)
            path = tuple(str(Path(entry).absolute()) for entry in (sys.path if same else [""]))
        spec: dict[str, Any] = {"target": self.target, "imports": self.imports, "path": path}
        return Command(
            name=self.name,
            argv=("{rollart}/workers/host.py",),
            spec={**spec, "socket": str(socket) if socket else None, "limit": self.message_bytes},
            log=self.log or NOWHERE,
            python=self.python,
            start_deadline=self.start_deadline,
        )


class HostProcess:
    """A running host. Started by `start`, ended by `stop`; `running` turns false once it is of no more use."""

    def __init__(self, spec: HostSpec, place: Place) -> None:
        self._spec = spec
        self._place = place
        self._folder: Path | None = None
        self._address: str | tuple[str, int] = ""
        self._started: ServiceHandle | None = None
        self._starting = asyncio.Semaphore(STARTING)
        self._slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._unreachable = False  # known before the launcher tells us that the process ended
        self.ended: asyncio.Task[str]

    @property
    def running(self) -> bool:
        return self._started is not None and not self.ended.done() and not self._unreachable

    @property
    def started(self) -> ServiceHandle:
        if self._started is None:
            raise RuntimeError("the host has not started")
        return self._started

    async def start(self, instead_of: ServiceHandle | None = None) -> None:
        """Raises ServiceError, for example when something cannot be imported."""
        if sys.platform != "linux":
            raise ServiceError("environments and rewards run in processes that need Linux; use a Linux machine or VM")
        allow_files()
        launcher, request = self._place.launcher, self._place.request
        self._folder = Path(tempfile.mkdtemp(prefix="rollart-")) if launcher.here else None
        command = self._spec.command(self._folder and self._folder / "socket")
        try:
            if instead_of is None:
                self._started = await launcher.launch(command, request)
            else:
                self._started = await relaunch(launcher, command, request, instead_of)
        except BaseException:
            self._remove_folder()
            raise
        address = self._started.answer["address"]
        self._address = address if isinstance(address, str) else (address[0], address[1])
        self.ended = asyncio.create_task(self._watch(self._started))

    async def _watch(self, started: ServiceHandle) -> str:
        reason = await started.wait()
        for slot in list(self._slots):
            slot.kill(f"{HOST_LOST}: {reason.splitlines()[0]}")
        return reason

    async def slot(self) -> Slot:
        """A new process. Raises SlotLost."""
        slot = Slot(self._spec.message_bytes)
        self._slots.add(slot)
        deadline = self._spec.start_deadline
        try:
            async with asyncio.timeout(deadline), self._starting:
                await self._connect(slot)
                await slot.started
        except TimeoutError:
            self.kill()  # a host that cannot fork in time is of no use to anybody
            slot.kill(f"the host started no process within {deadline:g} s and was killed")
            raise SlotLost(slot.lost) from None
        except OSError as error:
            self._unreachable = True
            slot.kill(f"the host cannot be reached: {error}")
            raise SlotLost(slot.lost) from error
        except SlotLost:
            self._unreachable = self._unreachable or slot.lost.startswith(HOST_LOST)
            raise
        except BaseException:
            slot.kill("its start was cancelled")
            raise
        return slot

    async def _connect(self, slot: Slot) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(self._address, str):
            await loop.create_unix_connection(lambda: slot, self._address)
        else:
            transport, _ = await loop.create_connection(lambda: slot, *self._address)
            enable_keepalive(transport.get_extra_info("socket"))
            transport.write(self._place.launcher.key.encode() + b"\n")

    def kill(self) -> None:
        self._unreachable = True
        if self._started is not None:
            self._started.kill()

    async def stop(self) -> None:
        """End the host and all that its slots started, within a deadline."""
        if self._started is not None:
            await self._started.stop()
            await self.ended
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def allow_files() -> None:
    """A slot is an open file here and in the host; the usual limit of 1,024 is there for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MANY_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(MANY_FILES, hard), hard))
