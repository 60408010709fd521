"""`rollart dashboard`: runs in the browser."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollart.app.commands.common import guarded
from rollart.core.errors import RollartError

if TYPE_CHECKING:
    import uvicorn

_LOOPBACK = "127.0.0.1"
_NICE = 10  # a run beside it comes first


@guarded
def dashboard(
    runs_dir: Annotated[
        Path, typer.Argument(metavar="[RUNS_DIR]", help="The folder of your runs, or the folder of one run.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")] = 0,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Others than loopback are reached by whoever has the key.")
    ] = _LOOPBACK,
    with_parent: Annotated[bool, typer.Option(hidden=True, help="End when stdin closes.")] = False,
) -> None:
    """Look at runs in the browser: live, finished, simulated or copied from elsewhere.

    Serves a page on this machine and prints its address, which has a key in it.
    It only reads, and can be started and stopped at any time.

    [dim]rollart dashboard
    rollart dashboard runs/quickstart-1 --port 8400[/dim]
    """
    import uvicorn

    from rollart.app.dashboard.runs import Runs
    from rollart.app.dashboard.server import make_app

    key = os.environ.pop("ROLLART_DASHBOARD_KEY", "") or secrets.token_urlsafe(18)
    config = uvicorn.Config(
        make_app(Runs(runs_dir), key), log_level="warning", access_log=False, timeout_graceful_shutdown=1
    )
    try:
        listening = _bind(host, port)
    except OSError as error:
        raise RollartError(f"{host}:{port} cannot be used: {error.strerror}; choose another --port") from error
    os.nice(_NICE)
    server = uvicorn.Server(config)
    if with_parent:
        threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    typer.echo(f"dashboard: http://{shown}:{listening.getsockname()[1]}/?key={key}")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    listening.listen()  # whoever reads the address may connect at once
    return listening


def _end_with_parent(server: "uvicorn.Server") -> None:
    sys.stdin.read()
    server.should_exit = True


@contextlib.contextmanager
def beside(folder: Path) -> Iterator[str]:
    """A dashboard of the runs beside this one too, in a process of its own, for as long as the run; yields its
    address."""
    command = [sys.executable, "-m", "rollart", "dashboard", str(folder.absolute().parent), "--with-parent"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        line = child.stdout.readline().strip()
        if not line:
            raise RollartError("the dashboard did not start; try `rollart dashboard` by itself")
        yield f"{line.removeprefix('dashboard: ')}#/overview/{folder.name}"
    finally:
        child.stdin.close()
        try:
            child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
