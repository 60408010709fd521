"""Hosts that are network namespaces on one bridge, and faults of their links, by the kernel's own means and one TAP.

Each host has an address and a shared memory of its own, so that weights and KV cross its link; the file system is that
of the machine, as on a cluster with a shared one. Namespaces end with the processes in them and with the mounts of the
process that made them.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from benchmarks.delayed_link import READY, TUN

NETWORK = "10.77.0"
RATE, LOSS_PERCENT, DELAY_S = "2mbit", 15, 0.08
DEADLINE_S = 30.0
_OWN_MEMORY = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
_FORWARD = "import sys; from benchmarks.delayed_link import forward; forward(*sys.argv[1:3], float(sys.argv[3]))"


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


def succeeds(*command: str) -> bool:
    try:
        return not subprocess.run(command, check=False, capture_output=True, timeout=DEADLINE_S).returncode
    except subprocess.TimeoutExpired:
        return False


def inside(host: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host, *command]


def with_own_memory(host: str, *command: str) -> list[str]:
    """A command in a host whose shared memory is its own. Several commands of a host do not share it."""
    return inside(host, "sh", "-c", _OWN_MEMORY, "sh", *command)


def address(host: str) -> str:
    return f"{NETWORK}.{int(host.removeprefix('host')) + 1}"


def connect_hosts(hosts: Iterable[str]) -> None:
    Path("/run/netns").mkdir(exist_ok=True)
    output("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
    output("ip", "link", "set", "lo", "up")
    output("ip", "link", "add", "switch", "type", "bridge")
    output("ip", "link", "set", "switch", "up")
    for host in hosts:
        output("ip", "netns", "add", host)
        output("ip", "link", "add", f"to-{host}", "type", "veth", "peer", "name", "eth0", "netns", host)
        output("ip", "link", "set", f"to-{host}", "master", "switch", "up")
        output("ip", "-n", host, "addr", "add", f"{address(host)}/24", "dev", "eth0")
        output("ip", "-n", host, "link", "set", "eth0", "up")
        output("ip", "-n", host, "link", "set", "lo", "up")


def kill_all(host: str) -> None:
    """All processes of the host, and those that they start meanwhile."""
    deadline = time.monotonic() + DEADLINE_S
    while pids := output("ip", "netns", "pids", host).split():
        if time.monotonic() > deadline:
            raise SystemExit(f"processes {pids} of {host} cannot be killed")
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


@contextmanager
def cut(host: str) -> Iterator[None]:
    output("ip", "link", "set", f"to-{host}", "down")
    try:
        yield
    finally:
        output("ip", "link", "set", f"to-{host}", "up")


@contextmanager
def narrow(host: str) -> Iterator[None]:
    """In both directions."""
    ends = (("tc", "qdisc", "{}", "dev", f"to-{host}"), ("tc", "-n", host, "qdisc", "{}", "dev", "eth0"))
    limits = ("tbf", "rate", RATE, "burst", "64kb", "latency", "300ms")
    for end in ends:
        output(*(word.format("add") for word in end), "root", *limits)
    try:
        yield
    finally:
        for end in ends:
            output(*(word.format("del") for word in end), "root")


@contextmanager
def lossy(host: str) -> Iterator[None]:
    chain = "add table inet loss; add chain inet loss in { type filter hook input priority 0; };"
    rule = f"add rule inet loss in numgen random mod 100 < {LOSS_PERCENT} drop;"
    output(*inside(host, "nft", f"{chain} {rule}"))
    try:
        yield
    finally:
        output(*inside(host, "nft", "delete table inet loss"))


@contextmanager
def delayed(host: str) -> Iterator[None]:
    """In both directions."""
    link, tap = f"to-{host}", f"tap-{host}"
    command = [sys.executable, "-c", _FORWARD, link, tap, str(DELAY_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline().strip() != READY:
                raise SystemExit(f"the packets of {host} cannot be delayed")
            output("ip", "link", "set", link, "nomaster")
            output("ip", "link", "set", tap, "master", "switch", "up")
            yield
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            output("ip", "link", "set", link, "master", "switch")


KINDS: dict[str, Callable[[str], AbstractContextManager[None]]] = {
    "link cut": cut,
    "narrow link": narrow,
    "packets lost": lossy,
    **({"packets delayed": delayed} if Path(TUN).exists() else {}),
}
