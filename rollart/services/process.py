"""A service as a child process: spec on stdin, address on stdout, end of stdin is the end of the service.

The parent keeps the write end of stdin open; when it goes, for whatever reason, kill -9 included, the service ends.
"""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import uvicorn

from rollart.services.rpc import MAX_FRAME, Handler, application

Build = Callable[[dict[str, Any]], AbstractAsyncContextManager[Mapping[str, Handler]]]


def main(build: Build) -> None:
    spec = json.loads(sys.stdin.readline())
    asyncio.run(_serve(build, spec))
    # Threads of native libraries must not hold up the end of a process that has already closed everything.
    os._exit(0)


async def _serve(build: Build, spec: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), lambda: _drain(over))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    async with build(spec) as handlers:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        host, port = listener.getsockname()[:2]
        server = _Server(
            uvicorn.Config(
                application(handlers),
                log_level="warning",
                lifespan="off",
                ws_max_size=MAX_FRAME,
                ws_per_message_deflate=False,
                ws_ping_interval=None,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        print(json.dumps({"url": f"http://{host}:{port}", "pid": os.getpid()}), flush=True)
        os.dup2(2, 1)  # nobody reads stdout from here on; what libraries print belongs in the log
        await over.wait()
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """Without uvicorn's own signal handling: the end of stdin and our handlers decide."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _drain(over: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        over.set()
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
