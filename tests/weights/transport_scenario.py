"""Two real processes and a transport between them; prints what happened as one JSON object.

`python transport_scenario.py nixl|mooncake`. Best run in a network namespace of its own, where every address is local:
Mooncake binds its ports on all interfaces.
"""

import fcntl
import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from transport_peer import bytes_of
from xxhash import xxh3_64_hexdigest

SIZE, BUCKET_BYTES = (9 << 20) + 640, 4 << 20
PEER = Path(__file__).with_name("transport_peer.py")
DEADLINE_S = 60.0


class Peer:
    def __init__(self, role: str, scheme: str, url: str) -> None:
        command = [sys.executable, str(PEER), role, scheme, url, str(SIZE), str(BUCKET_BYTES)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, what: str, **arguments: Any) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self.process.stdin.flush()
        return str(json.loads(self.process.stdout.readline()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def play(scheme: str, url: str) -> dict[str, Any]:
    publisher, receiver = Peer("publisher", scheme, url), Peer("receiver", scheme, url)
    try:
        came = {}
        for version in (1, 2, 3, 4):
            source = publisher.ask("publish", version=version)
            came[version] = receiver.ask("fetch", url=source, version=version)
        kept = {version: receiver.ask("fetch", url=source, version=version) for version in (2, 3)}
        publisher.kill()
        lost = receiver.ask("fetch", url=source, version=4)
        publisher = Peer("publisher", scheme, url)
        again = receiver.ask("fetch", url=publisher.ask("publish", version=5), version=5)
        closed = publisher.ask("close")
    finally:
        publisher.kill()
        receiver.kill()
    right = {version: xxh3_64_hexdigest(bytes_of(version, SIZE).data) for version in (2, 3, 5)}
    return {
        "came": [came[version] == xxh3_64_hexdigest(bytes_of(version, SIZE).data) for version in came],
        "kept": {version: kept[version] == right[version] for version in kept},
        "older": kept[2],
        "lost": lost,
        "again": again == right[5],
        "closed": closed,
    }


def loopback_up() -> None:
    """A new network namespace has a loopback that is down."""
    with socket.socket() as any_socket:
        name = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, 0x8913, name))[1]
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", flags | 1))


def master(port: int, metrics: int) -> subprocess.Popen[bytes]:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.submodule_search_locations
    program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    options = {"rpc_address": "127.0.0.1", "rpc_port": port, "metrics_host": "127.0.0.1", "metrics_port": metrics}
    command = [str(program), *(f"--{name}={value}" for name, value in options.items())]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def await_port(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise


def main(scheme: str) -> dict[str, Any]:
    os.environ["UCX_NET_DEVICES"] = "lo"
    if scheme == "nixl":
        return play(scheme, "")
    port, metrics = free_ports(2)
    running = master(port, metrics)
    try:
        await_port(port)
        return play(scheme, f"mooncake://127.0.0.1:{port}")
    finally:
        running.kill()
        running.wait()


if __name__ == "__main__":
    if os.environ.get("OWN_NETWORK"):
        loopback_up()
    print(json.dumps(main(sys.argv[1])))
