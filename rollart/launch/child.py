"""A command as a child process.

Invariants:
- Each child has its own session, so Ctrl-C reaches only the controller, which then stops its children in order.
- A child that crashed may leave descendants in other process groups. All of them have its mark in their environment or,
  if they overwrote that with a process title, its session id; they are killed before the end of the child is reported.
- A start that fails leaves no process, and its error has the last lines of the child's log.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from rollart.core import variables
from rollart.core.errors import ServiceError
from rollart.launch.launcher import Command

MARK = "ROLLART_MARK"
PACKAGE = Path(__file__).parents[1]
PROCESSES = Path("/proc")  # Linux
STOP_DEADLINE = 10.0
CLEAN_SCANS, SCAN_PERIOD_S, SWEEP_DEADLINE = 3, 0.03, 10.0


class _KilledAtStart(ServiceError):
    """By a signal that it cannot have sent itself."""


class Child:
    """Implements `rollart.launch.launcher.ServiceHandle`. Created by `start`."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process, mark: str) -> None:
        self.name = command.name
        self.pid = process.pid
        self.node = self.address = self.device = ""
        self.node_lost = False
        self.answer: Mapping[str, Any] = {}
        self.process = process
        self.log = command.log
        self.ended = asyncio.create_task(self._end(mark))

    @classmethod
    async def start(cls, command: Command, more: Mapping[str, Any], spare: Self | None = None) -> Self:
        """Send it, or `spare`, its spec and `more`, and wait until it is ready. One that is killed meanwhile, by a
        machine without memory for instance, is started once more. Raises ServiceError."""
        try:
            return await (spare or await cls.spawn(command))._started(command, more)
        except _KilledAtStart:
            return await (await cls.spawn(command))._started(command, more)

    @classmethod
    async def spawn(cls, command: Command) -> Self:
        """The process of a command, which waits for its spec. Raises ServiceError."""
        python, mark = command.python or sys.executable, uuid.uuid4().hex
        try:
            inherited = os.environ if command.pass_env is None else variables.passed(os.environ, command.pass_env)
        except variables.MissingVariables as error:
            raise ServiceError(f"could not start {command.name}: {error}") from None
        try:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            errors = open(command.log, "ab")  # noqa: ASYNC230, SIM115 (opens at once)
        except OSError as error:
            raise ServiceError(f"could not start {command.name}: its log cannot be written: {error}") from error
        with errors:
            try:
                process = await asyncio.create_subprocess_exec(
                    python,
                    *(word.replace("{rollart}", str(PACKAGE)) for word in command.argv),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    env={**inherited, **command.environment, MARK: mark},
                    start_new_session=True,
                )
            except OSError as error:
                raise ServiceError(f"could not start {command.name}: {python} cannot be run: {error}") from error
        return cls(command, process, mark)

    async def _started(self, command: Command, more: Mapping[str, Any]) -> Self:
        try:
            self.answer = await self._ready(command, {**command.spec, **more})
        except BaseException:
            self.kill()
            await asyncio.shield(self.ended)
            raise
        return self

    async def _ready(self, command: Command, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(
            OSError, RuntimeError
        ):  # it ended at once, and its pipe is closed: no answer will say so
            self.process.stdin.write(json.dumps(spec).encode() + b"\n")
        try:
            async with asyncio.timeout(command.start_deadline):
                answer = await self._answer(self.process.stdout)
        except TimeoutError:
            hint = f"; raise {command.start_key} in the run file" if command.start_key else ""
            late = f"{self.name} did not start within {command.start_deadline:g} s{hint}"
            raise ServiceError(late + tail(self.log)) from None
        if answer is None:
            code, python = await self.process.wait(), command.python or sys.executable
            error = _KilledAtStart if code == -signal.SIGKILL else ServiceError
            how = describe(code) + tail(self.log)
            raise error(f"could not start {self.name}: {python} ended while it started, with {how}")
        if "error" in answer:
            raise ServiceError(str(answer["error"]))
        return answer

    async def _answer(self, output: asyncio.StreamReader) -> dict[str, Any] | None:
        """Its first line that is a JSON object, or None if it ended. Other lines, printed by libraries, are logged."""
        while line := await _line(output):
            try:
                answer = json.loads(line)
            except ValueError:
                answer = None
            if isinstance(answer, dict):
                return answer
            with open(self.log, "ab") as log:  # noqa: ASYNC230 (opens at once)
                log.write(line)
        return None

    async def _end(self, mark: str) -> str:
        code = await self.process.wait()
        if code != 0 and PROCESSES.exists():
            await sweep(mark, self.pid)
        return f"{self.name} ended with {describe(code)}{tail(self.log)}"

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def stop(self) -> None:
        """Close its stdin, which ends it; kill its process group if it has not ended by the deadline."""
        if self.process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it may have ended by itself
                self.process.stdin.close()
        try:
            async with asyncio.timeout(STOP_DEADLINE):
                await self.wait()
        except TimeoutError:
            self.kill()
            await self.wait()

    def kill(self) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


async def _line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readline()
    except ValueError:  # longer than any answer of ours; readline discarded it
        return b"(a line too long to keep)\n"


async def sweep(mark: str, session: int) -> None:
    """Kill every process with this mark or of this session."""
    marked = f"{MARK}={mark}".encode()
    clean, deadline = 0, time.monotonic() + SWEEP_DEADLINE
    while clean < CLEAN_SCANS and time.monotonic() < deadline:  # during an exec, a process has no mark
        clean += 1
        for entry in PROCESSES.iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (_in_session(session, entry) or marked in (entry / "environ").read_bytes()):
                    os.kill(int(entry.name), signal.SIGKILL)
                    clean = 0
        await asyncio.sleep(SCAN_PERIOD_S)


def _in_session(session: int, entry: Path) -> bool:
    """Whether the process is in the session, and no zombie."""
    state, _, _, its, *_ = (entry / "stat").read_bytes().rpartition(b")")[2].split()
    return int(its) == session and state != b"Z"


def describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def tail(log: Path, lines: int = 6, most: int = 4000) -> str:
    if not log.is_file():
        return ""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        text = file.read().decode(errors="replace").strip().splitlines()[-lines:]
    return f"; {log} ends with:\n  " + "\n  ".join(text) if text else ""
