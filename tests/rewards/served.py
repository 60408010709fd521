"""Starts a real server process, waits until it answers, and ends it with all that it started."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

START_S = 60.0


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def server(argv, port, cwd, **environment):
    """Yields its address. `argv` must make it listen on `port`."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(argv, cwd=cwd, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for(url, process):
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(url, timeout=START_S):
                return
        except urllib.error.URLError:
            pass  # its port is not open yet, and nothing tells when it is
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            raise AssertionError(process.communicate()[1])
    raise AssertionError(f"no answer from {url}")
