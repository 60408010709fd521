"""Strangers at the ports of a run: without a key, with a wrong one, and many at the same time."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollart.workers import callers, host

CALL = json.dumps(
    {"id": 1, "call": "reset", "args": {"env": "attackers:Greedy", "args": {}, "held_out": False, "seed": 0}}
)


@pytest.fixture
def served() -> Iterator[tuple[psutil.Process, tuple[str, int]]]:
    """A host of environments on a port, with the key `secret` and room for two processes."""
    spec = {"target": host.ENVIRONMENT, "imports": [host.ENVIRONMENT], "path": [str(Path(__file__).parent)]}
    spec |= {"socket": None, "bind": "127.0.0.1", "key": "secret", "limit": 100_000, "processes": 2, "limits": {}}
    process = subprocess.Popen([sys.executable, host.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(spec).encode() + b"\n")
    process.stdin.flush()
    address, port = json.loads(process.stdout.readline())["address"]
    yield psutil.Process(process.pid), (address, port)
    process.stdin.close()
    process.wait(20)
    process.stdout.close()


def lines(connection: socket.socket, count: int) -> list[dict[str, object]]:
    """Fewer if the host closes the connection."""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionResetError), connection.makefile("rb") as file:
        return [json.loads(line) for line in (file.readline() for _ in range(count)) if line.strip()]
    return []


def played(address: tuple[str, int]) -> None:
    """An episode of a caller with the key, all in one packet."""
    with socket.create_connection(address, 20) as connection:
        connection.sendall(b"secret\n" + CALL.encode() + b"\n")
        forked, reply = lines(connection, 2)
    assert forked["pid"] and reply["value"] == "ready"


def test_connections_without_the_key_cost_a_host_no_process_and_lock_nobody_out(
    served: tuple[psutil.Process, tuple[str, int]],
) -> None:
    process, address = served
    strangers = [socket.create_connection(address, 20) for _ in range(callers.MAX_CALLERS + 20)]
    for stranger in strangers[::2]:
        stranger.sendall(b"sec")
    played(address)
    assert len(process.children()) <= 1
    assert lines(strangers[0], 1) == [], "the oldest made room"
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("shown", [b"wrong!\n", b"x\n", b"secretsecret\n", b"\n", b"secret\0"])
def test_a_wrong_key_starts_no_process(served: tuple[psutil.Process, tuple[str, int]], shown: bytes) -> None:
    process, address = served
    with socket.create_connection(address, 20) as connection:
        connection.sendall(shown)
        assert lines(connection, 1) == []
    assert process.children() == []


def test_a_host_forks_no_more_processes_than_it_may(served: tuple[psutil.Process, tuple[str, int]]) -> None:
    process, address = served
    connections = [socket.create_connection(address, 20) for _ in range(3)]
    replies = []
    for connection in connections:
        connection.sendall(b"secret\n")
        replies += lines(connection, 1)
    assert [set(reply) for reply in replies] == [{"pid"}, {"pid"}, {"ended"}]
    assert "as many as it may" in str(replies[2]["ended"]) and len(process.children()) == 2
    for connection in connections:
        connection.close()
