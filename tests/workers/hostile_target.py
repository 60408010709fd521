"""Code in a worker process: one method for each way to be good or bad. Imported by the host, not by pytest."""

import ctypes
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path


class Target:
    def echo(self, value):
        return value

    def pid(self):
        return os.getpid()

    def hang(self):
        time.sleep(3600)

    def exit(self, code):
        os._exit(code)

    def crash(self):
        ctypes.string_at(0)

    def leave(self):
        sys.exit("I leave")

    def fail(self):
        raise ValueError("no good")

    def giant(self, size):
        return "x" * size

    def unsendable(self):
        return {1, 2, 3}

    def surrogate(self):
        return "\ud800"

    def chatter(self):
        print('{"id": 1, "value": "printed"}', flush=True)
        os.write(1, b'{"id": 1, "value": "written"}\n')
        return sys.stdin.read()

    def raw(self, text):
        """Write on our own connection, as no honest code does."""
        for descriptor in range(3, 64):
            try:
                connection = socket.socket(fileno=os.dup(descriptor))
            except OSError:
                continue
            if connection.family == socket.AF_UNIX and connection.type == socket.SOCK_STREAM:
                connection.sendall(text.encode())
        return "after"

    def flood(self, size):
        self.raw("x" * size)
        self.hang()

    def breed(self):
        """A child in our process group, and one that left it."""
        near = subprocess.Popen(["sleep", "3600"])
        far = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        return [os.getpid(), near.pid, far.pid]

    def linger(self, how, marker):
        """Touch the marker, then do not return; `how` is what an interruption meets."""
        getattr(self, "_" + how)(lambda: Path(marker).touch())

    def _plainly(self, begun):
        begun()
        self.hang()

    def _swallowing(self, begun):
        begun()
        while True:
            with suppress(BaseException):
                self.hang()

    def _breeding(self, begun):
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        self._plainly(begun)

    def _threading(self, begun):
        threading.Thread(target=self.hang, daemon=True).start()
        self._plainly(begun)

    def _importing(self, begun):
        sys.meta_path.insert(0, HangingFinder(begun, self.hang))
        import never_there  # noqa: F401

    def _computing(self, begun):
        begun()
        deque(itertools.count(), maxlen=0)  # in C, for ever

    def close(self):
        return "closed"


class HangingFinder:
    def __init__(self, begun, hang):
        self.begun, self.hang = begun, hang

    def find_spec(self, *_):
        self.begun()
        self.hang()


def refuse():
    raise RuntimeError("not importable by name only")
