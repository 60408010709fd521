"""The local launcher: services as child processes of the controller.

Each child gets its own session, so Ctrl-C reaches only the controller, which then ends them in order. A child's
standard error goes to a file in the run folder; its last lines are part of the error when it fails to start.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollart.errors import ServiceError

START_DEADLINE = 120.0
STOP_DEADLINE = 5.0


@dataclass(slots=True)
class ServiceProcess:
    name: str
    url: str
    process: asyncio.subprocess.Process
    log: Path

    async def wait(self) -> str:
        """Why it ended, once it has."""
        code = await self.process.wait()
        return f"{self.name} ended with {_describe(code)}{_tail(self.log)}"

    async def stop(self) -> None:
        """Close its stdin, which asks it to end; kill its whole process group if it does not."""
        if self.process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it may have ended by itself
                self.process.stdin.close()
        try:
            async with asyncio.timeout(STOP_DEADLINE):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


async def launch(module: str, spec: Mapping[str, Any], *, name: str, logs: Path, threads: int = 1) -> ServiceProcess:
    """Start `python -m module`, hand it `spec`, and wait until it tells its address."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    with open(log, "ab") as errors:  # noqa: ASYNC230 (opens at once)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
    service = ServiceProcess(name, "", process, log)
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        async with asyncio.timeout(START_DEADLINE):
            line = await process.stdout.readline()
        if not line:
            raise ServiceError(f"could not start {name}: {await service.wait()}")
        service.url = json.loads(line)["url"]
    except TimeoutError:
        raise ServiceError(f"{name} did not start within {START_DEADLINE:g} s{_tail(log)}") from None
    finally:
        if not service.url:
            service.kill()
    return service


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _tail(log: Path, lines: int = 6) -> str:
    text = log.read_text(errors="replace").strip().splitlines()[-lines:] if log.exists() else []
    return f"; {log} ends with:\n  " + "\n  ".join(text) if text else ""
