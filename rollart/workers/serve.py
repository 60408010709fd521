"""A host of environments for remote runs: listens on a port, and forks a process for each connection with the key.

    ROLLART_WORKER_KEY=... rollart envs serve --host 0.0.0.0 --port 7070 --import my_envs:Lake

A run reaches it by a pool in its run file, with the same key in its environment:

    pools: {lakes: {role: environment, device: cpu, urls: ["tcp://10.0.0.7:7070"]}}

Needs the standard library only, so the Python of a family, or one without rollart, can run it by its path. What is
imported at the start is shared by all processes; anything else that this Python can import is imported by each process
that needs it. It ends by SIGTERM or Ctrl-C, with all that it started. Keys and episodes are sent unencrypted: use it in
a network that you trust.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

KEY = "ROLLART_WORKER_KEY"
NO_KEY = f"set {KEY} to a secret that runs must send: without one, anyone who reaches the port could run code here"
ENTRY = "{rollart}/envs/process_entry.py:EnvironmentProcess"


def host_module() -> Any:
    """`host.py`, loaded by its path: our package may not be installed here."""
    spec = importlib.util.spec_from_file_location("_rollart_host", Path(__file__).with_name("host.py"))
    if spec is None or spec.loader is None:
        raise ImportError("host.py is not in the folder of serve.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog=f"The key is taken from {KEY}.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=7070, help="0: any that is free")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE:NAME")
    parser.add_argument("--limit", type=int, default=4_000_000, help="bytes of one message")
    options = parser.parse_args()
    if not os.environ.get(KEY):
        sys.exit(NO_KEY)
    serve(options)


def serve(options: argparse.Namespace) -> None:
    host = host_module()
    key = os.environ.pop(KEY)  # hidden from the environments
    host.prctl(host.PR_SET_CHILD_SUBREAPER, 1)
    for name in host.ONE_THREAD:
        os.environ.setdefault(name, "1")
    try:
        target = host.prepare({"path": [str(Path.cwd())], "imports": [ENTRY, *options.imports], "target": ENTRY})
        listener = host.listen({"socket": None, "key": key, "bind": options.host, "port": options.port})
    except (ImportError, OSError) as error:
        sys.exit(str(error))
    address, port = listener.getsockname()
    print(f"serving environments at tcp://{address}:{port}", flush=True)
    # A host lives as long as its standard input; this one until a signal.
    forever, _ = os.pipe()
    os.dup2(forever, 0)
    os.dup2(2, 1)
    host.Host(listener, target, options.limit, key).serve()


if __name__ == "__main__":
    main()
