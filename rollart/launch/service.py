"""A service as a child process: it reads its spec from stdin, prints its address to stdout and ends with stdin.

The parent holds the write end of stdin, so the service ends with its parent, even after kill -9. `bind` in the spec is
the address to listen on, `port` the port, by default a free one, `key` the secret that callers must show.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollart.core.errors import RollartError, ServiceError
from rollart.launch import with_parent
from rollart.launch.keepalive import enable_keepalive
from rollart.launch.rpc import MAX_FRAME, Handler, application

LOOPBACK = "127.0.0.1"
KEY_S, MAX_CALLERS = 10.0, 64
Build = Callable[[dict[str, Any]], AbstractAsyncContextManager[Mapping[str, Handler]]]
Serve = Callable[[dict[str, Any]], AbstractAsyncContextManager[Mapping[str, Any]]]


def main(build: Build) -> None:
    """A service whose methods are called by RPC."""
    run_service(partial(_serve_rpc, build))


def run_service(serve: Serve, loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Until stdin closes. `serve` yields what is printed, once it can be reached; `loop` makes the event loop, if not
    the default one."""
    spec = json.loads(sys.stdin.readline())
    code = 0
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(_until_stopped(serve, spec))
    except asyncio.CancelledError:
        pass  # stopped before it had started
    except BaseException:
        traceback.print_exc()
        code = 1
    # Everything is closed; threads of native libraries must not delay the exit.
    os._exit(code)


async def _until_stopped(serve: Serve, spec: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    stopped, started = asyncio.Event(), asyncio.Event()
    starting = asyncio.current_task()

    def end() -> None:
        stopped.set()
        if not started.is_set() and starting is not None:
            starting.cancel()

    loop.add_reader(sys.stdin.fileno(), lambda: _drain(end))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    with_parent.clean_up_first()
    async with serve(spec) as answer:
        started.set()
        print(json.dumps({**answer, "pid": os.getpid()}), flush=True)
        os.dup2(2, 1)  # the parent has stopped reading stdout; what libraries print goes to the log
        await stopped.wait()


@asynccontextmanager
async def _serve_rpc(build: Build, spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
    async with build(spec) as handlers:
        listener = _listen(spec)
        host, port = listener.getsockname()[:2]
        server = _Server(
            uvicorn.Config(
                application(handlers, spec.get("key")),
                http=_GuardedHttp,
                log_level="warning",
                lifespan="off",
                ws_max_size=MAX_FRAME,
                ws_per_message_deflate=False,
                ws_ping_interval=None,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield {"url": f"http://{host}:{port}"}
        finally:
            server.should_exit = True
            await serving


def _listen(spec: Mapping[str, Any]) -> socket.socket:
    address = spec.get("bind", LOOPBACK)
    if address != LOOPBACK and not spec.get("key"):
        raise ServiceError(f"a service that listens on {address} needs a `key`: other machines can reach it")
    listener = socket.socket()
    enable_keepalive(listener)  # connections inherit it
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a process before it may linger
    listener.bind((address, int(spec.get("port", 0))))
    listener.listen(128)
    return listener


class _GuardedHttp(HttpToolsProtocol):
    """A connection that is no WebSocket yet, and so has shown no key: it may be that for `KEY_S`, and the oldest makes
    room for more than `MAX_CALLERS`."""

    callers: ClassVar[dict["_GuardedHttp", None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.callers[self] = None
        if len(self.callers) > MAX_CALLERS:
            next(iter(self.callers)).close()
        self.loop.call_later(KEY_S, self.close)

    def close(self) -> None:
        if self.callers.pop(self, self) is None:
            self.transport.abort()

    def handle_websocket_upgrade(self) -> None:
        self.callers.pop(self, None)
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        self.callers.pop(self, None)
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Without uvicorn's signal handlers: it ends with stdin, or by our own handlers."""

    def capture_signals(self) -> Any:
        return nullcontext()


def _drain(end: Callable[[], None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        end()
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())


def torch_device(device: str, spec: Mapping[str, Any]) -> str:
    """`device` of the run file; `auto` is cpu or cuda, by the device `classes` in the spec. Raises RollartError."""
    import torch

    if device != "auto":
        return device
    classes = spec.get("classes") or ["cpu"]
    if classes == ["cpu"]:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if "cpu" in classes:
        return "cpu"
    raise RollartError(
        f"this process was placed on a node of class {' or '.join(classes)}, but torch finds no GPU here; install a "
        "build of torch for it, or set `device: cpu` in the sections engine and training to run on CPUs"
    )
