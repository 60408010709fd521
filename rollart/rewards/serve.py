"""A reward function as a functions-framework service on this machine, with the very file that `package` writes."""

import os
import runpy
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rollart.core.errors import RollartError
from rollart.rewards.package import MAIN
from rollart.rewards.runtime import Reward, find
from rollart.rewards.wire import SECRET

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def found(target: str) -> Reward:
    """The function. Raises RollartError."""
    try:
        return find(target)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise RollartError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error


def run(target: str, host: str, port: int, threads: int) -> None:
    """Becomes the service. Raises RollartError for what is known to be wrong before."""
    if find_spec("functions_framework") is None:
        raise RollartError("serving needs functions-framework; run: pip install 'rollart[serve]'")
    if host not in LOOPBACK and not os.environ.get(SECRET):
        raise RollartError(f"on {host} anybody could call it; set {SECRET} first, so that requests must be signed")
    found(target)
    with tempfile.TemporaryDirectory(prefix="rollart-reward-") as folder:
        source = Path(folder) / "main.py"
        source.write_text(MAIN.format(target=target), encoding="utf-8")
        _serve(source, host, port, threads)


def _serve(source: Path, host: str, port: int, threads: int) -> None:
    """As `python -m functions_framework` would, in this process, so that signals and modules are the user's own."""
    os.environ["THREADS"] = str(threads)
    sys.argv = ["functions-framework", f"--source={source}", "--target=score", f"--host={host}", f"--port={port}"]
    print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
    runpy.run_module("functions_framework", run_name="__main__")
