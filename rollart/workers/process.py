"""The controller's side of one host: its life, and its slots.

The invariants:
- A slot has at most one call under way. A call that misses its deadline, is cancelled, or gets an answer that breaks
  the protocol ends its slot, so an answer can only ever belong to the call that waits for it.
- A slot that is lost stays lost; closing its connection makes the host kill the process group behind it.
- A host that died by itself takes every slot with it, and what the slots had started is found by the host's mark in
  the environment of each process.
"""

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rollart.errors import RollartError, ServiceError

SCRIPT = Path(__file__).with_name("host.py")
MARK = "ROLLART_HOST"
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # a forked process has lost the others
STARTING = 32  # connections that wait for their fork at once, within every system's backlog
HOST_LOST = "the process ended, and its host with it"
MANY_FILES = 16_384
CLEAN_LOOKS, LOOK_AGAIN_S = 3, 0.03
END_S = 10.0  # for a host to end its slots and itself


class SlotLost(RollartError):
    """The process hung, ended or broke the protocol. It is gone, with its state."""


class CallRaised(RollartError):
    """The called code raised, or answered what cannot be sent. The process lives."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """`target` is made once in each slot, its methods are the calls; `imports` are made once, in the host.

    Both are `package.module:name` or `/a/file.py:name`. `path` comes before what `python` has by itself;
    None: where this process finds its modules if it is the same Python, otherwise the working folder.
    """

    target: str
    imports: tuple[str, ...] = ()
    python: str = sys.executable
    path: tuple[str, ...] | None = None
    message_bytes: int = 4_000_000
    start_deadline: float = 60.0
    log: Path | None = None

    def open_log(self) -> BinaryIO:
        return open(self.log or os.devnull, "ab")

    def line(self, socket: Path) -> bytes:
        path = self.path
        if path is None:
            path = tuple(str(Path(entry).absolute()) for entry in (sys.path if self.python == sys.executable else [""]))
        spec = {"target": self.target, "imports": self.imports, "path": path}
        return json.dumps({**spec, "socket": str(socket), "limit": self.message_bytes}).encode() + b"\n"


class Slot(asyncio.Protocol):
    """One process, spoken to over its own connection."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._serial = 0
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._transport: asyncio.Transport | None = None
        self.started: asyncio.Future[int] = self._loop.create_future()
        self.lost = ""

    async def call(self, name: str, args: Mapping[str, object], deadline: float) -> Any:
        """Raises SlotLost or CallRaised."""
        if self.lost or self._transport is None:
            raise SlotLost(self.lost or "the process has not started")
        if self._answer is not None:
            raise RuntimeError("a slot takes one call at a time")
        self._serial += 1
        frame = msgspec.json.encode({"id": self._serial, "call": name, "args": args}) + b"\n"
        if len(frame) > self._limit:
            raise CallRaised(f"`{name}` was given {len(frame):,} bytes, more than the limit of {self._limit:,}")
        self._answer = self._loop.create_future()
        self._transport.write(frame)
        try:
            async with asyncio.timeout(deadline):
                answer = await self._answer
        except TimeoutError:
            self.kill(f"`{name}` did not answer within {deadline:g} s; the process was killed")
            raise SlotLost(self.lost) from None
        except asyncio.CancelledError:
            self.kill(f"`{name}` was cancelled; the process was killed")
            raise
        finally:
            self._answer = None
        if "error" in answer:
            raise CallRaised(str(answer["error"]))
        return answer["value"]

    def kill(self, reason: str) -> None:
        """End the process group. The first reason stays."""
        self.lost = self.lost or reason
        if self._transport is not None:
            self._transport.abort()
        for waiting in (self._answer, self.started):
            if waiting is not None and not waiting.done():
                waiting.set_exception(SlotLost(self.lost))
                waiting.exception()  # seen, even if nobody waits any more

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if b"\n" in data:
            *lines, rest = self._buffer.split(b"\n")
            self._buffer = rest
            for line in lines:
                if line and not self.lost:
                    self._received(line)
        if len(self._buffer) > self._limit:
            self.kill(f"the process answered more than {self._limit:,} bytes and was killed")

    def _received(self, line: bytes | bytearray) -> None:
        try:
            message = msgspec.json.decode(line, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            self.kill(f"the process answered what is not one JSON object ({error}) and was killed")
            return
        if "ended" in message:
            self.kill(f"the process {message['ended']}")
        elif "pid" in message and not self.started.done():
            self.started.set_result(message["pid"])
        elif self._answer is None or self._answer.done() or message.get("id") != self._serial:
            self.kill("the process answered what was not asked and was killed")
        elif "value" in message or "error" in message:
            self._answer.set_result(message)
        else:
            self.kill("the process answered neither a value nor an error and was killed")

    def connection_lost(self, error: Exception | None) -> None:
        self.kill(HOST_LOST)


class HostProcess:
    """A running host. Started by `start`, ended by `stop`; `running` turns false once it is of no more use."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._folder: Path | None = None
        self._mark = uuid.uuid4().hex
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Semaphore(STARTING)
        self._unreachable = False  # known before the system tells us that the process ended

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None and not self._unreachable

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the host has not started")
        return self._process.pid

    async def start(self) -> None:
        """Raises ServiceError, for example when something cannot be imported."""
        if sys.platform != "linux":
            raise ServiceError("environments and rewards run in processes that need Linux; use a Linux machine or VM")
        allow_files()
        self._folder = Path(tempfile.mkdtemp(prefix="rollart-"))
        environ = dict.fromkeys(ONE_THREAD, "1") | dict(os.environ) | {MARK: self._mark}
        try:
            with self._spec.open_log() as log:
                self._process = await asyncio.create_subprocess_exec(
                    self._spec.python,
                    str(SCRIPT),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=environ,
                    start_new_session=True,  # Ctrl-C is the controller's to handle
                )
            await self._ready(self._process)
        except OSError as error:
            await self.stop()
            raise ServiceError(f"{self._spec.python} cannot be run: {error}") from error
        except BaseException:
            await self.stop()
            raise

    async def _ready(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin and process.stdout and self._folder
        process.stdin.write(self._spec.line(self._folder / "socket"))
        deadline = self._spec.start_deadline
        try:
            async with asyncio.timeout(deadline):
                line = await process.stdout.readline()
        except TimeoutError:
            raise ServiceError(f"a worker host did not finish its imports within {deadline:g} s") from None
        if not line:
            raise ServiceError(f"{self._spec.python} ended while it started; is it Python 3.9 or newer?")
        message = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in message:
            raise ServiceError(message["error"])

    async def slot(self) -> Slot:
        """A new process. Raises SlotLost."""
        assert self._folder
        slot = Slot(self._spec.message_bytes)
        deadline = self._spec.start_deadline
        try:
            async with asyncio.timeout(deadline), self._starting:
                await asyncio.get_running_loop().create_unix_connection(lambda: slot, str(self._folder / "socket"))
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
            self._unreachable = slot.lost == HOST_LOST
            raise
        except BaseException:
            slot.kill("its start was cancelled")
            raise
        return slot

    def kill(self) -> None:
        self._unreachable = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def stop(self) -> None:
        """End the host and all that its slots started, within a deadline."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            try:
                async with asyncio.timeout(END_S):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
            if self._process.returncode != 0:
                await sweep(self._mark)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def allow_files() -> None:
    """A slot is an open file here and in the host; the usual limit of 1,024 is there for programs that use select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MANY_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(MANY_FILES, hard), hard))


async def sweep(mark: str) -> None:
    """Kill every process that descends from the host with this mark."""
    wanted = f"{MARK}={mark}".encode()
    clean, deadline = 0, time.monotonic() + END_S
    while clean < CLEAN_LOOKS and time.monotonic() < deadline:  # in the middle of an exec, a process shows no mark
        clean += 1
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
                    clean = 0
        await asyncio.sleep(LOOK_AGAIN_S)
