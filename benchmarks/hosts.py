"""Hosts are network namespaces: links are cut, narrowed and lose packets under a real run on Ray.

Six namespaces on one bridge, each with an address of its own: the controller beside Ray's head, a trainer, two engines
that train as well if they must, two hosts of environments. In turn, from a seed, the link of one of them is down for
some seconds, or for so long that Ray gives the node up and it joins again, has a narrow rate, or drops packets; all of
it with the kernel's own means (`ip`, `tc`, `nft`; the kernel here has no netem). Requests, batches and weights cross
those links. Then the auditor of `chaos.py` reads what the run left.

Needs root. Last line: `faults` by `kinds`, `violations`, `finished`, `lost_trajectories`, `trained_twice`, outcomes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.audit import audit
from benchmarks.ray_faults import accounts, run_file, train
from benchmarks.scratch import scratch_folder
from rollart.core.events import AnyEvent, StepDone

HEAD = "host0"
DEVICES = {"host1": "H800", "host2": "H20", "host3": "H20", "host4": "cpu", "host5": "cpu"}
NETWORK = "10.77.0"
PORT = 6379
# Ray gives a node up after ten seconds without an answer.
HEALTH = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 20}
START_S = 180.0
SHORT_S, LONG_S, GAP_S = (1.0, 5.0), 15.0, 5.0
OWN_WORLD = "ROLLART_HOSTS"


def run(*command: str) -> None:
    _output(*command)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def _succeeds(*command: str) -> bool:
    try:
        return not subprocess.run(command, check=False, capture_output=True, timeout=30).returncode
    except subprocess.TimeoutExpired:
        return False


def inside(host: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host, *command]


def address(host: str) -> str:
    return f"{NETWORK}.{int(host.removeprefix('host')) + 1}"


def connect_hosts() -> None:
    """A bridge with a link to each host. The namespaces end with the processes in them and with this mount table."""
    Path("/run/netns").mkdir(exist_ok=True)
    run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "link", "set", "switch", "up")
    for host in (HEAD, *DEVICES):
        run("ip", "netns", "add", host)
        run("ip", "link", "add", f"to-{host}", "type", "veth", "peer", "name", "eth0", "netns", host)
        run("ip", "link", "set", f"to-{host}", "master", "switch", "up")
        run("ip", "-n", host, "addr", "add", f"{address(host)}/24", "dev", "eth0")
        run("ip", "-n", host, "link", "set", "eth0", "up")
        run("ip", "-n", host, "link", "set", "lo", "up")


class Cluster:
    """Ray's nodes, one in each host; `join` starts the node of a host again."""

    def __init__(self, scratch: Path) -> None:
        self._scratch, self._nodes = scratch, dict[str, subprocess.Popen[bytes]]()

    def start(self) -> None:
        own = (
            "--include-dashboard=false",
            f"--temp-dir={self._scratch / 'ray'}",
            f"--system-config={json.dumps(HEALTH)}",
        )
        self._node(HEAD, "--head", f"--port={PORT}", "--num-cpus=0", *own)
        self._wait_for(1)
        for number, host in enumerate(DEVICES, 2):  # at once, they would claim the same files of this machine
            self.join(host)
            self._wait_for(number)

    def _wait_for(self, nodes: int) -> None:
        look = f"import ray; ray.init('{address(HEAD)}:{PORT}'); exit(len(ray.nodes()) < {nodes})"
        deadline = time.monotonic() + START_S
        while not _succeeds(*inside(HEAD, sys.executable, "-c", look)):
            if time.monotonic() > deadline:
                raise SystemExit(f"no {nodes} nodes of Ray within {START_S:g} s; see {self._scratch}")
            time.sleep(1)

    def join(self, host: str) -> None:
        labels = f"--labels=rollart.io/device={DEVICES[host]}"
        self._node(host, f"--address={address(HEAD)}:{PORT}", "--num-cpus=2", labels)

    def leave(self, host: str) -> None:
        """All processes of the host are killed, and those that they start meanwhile."""
        deadline = time.monotonic() + 30
        while pids := _output("ip", "netns", "pids", host).split():
            if time.monotonic() > deadline:
                raise SystemExit(f"processes {pids} of {host} cannot be killed")
            for pid in map(int, pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._nodes.pop(host).wait(30)

    def end(self) -> None:
        for host in list(self._nodes):
            self.leave(host)

    def _node(self, host: str, *options: str) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        own = f"--node-ip-address={address(host)}"
        command = inside(host, ray, "start", "--block", "--object-store-memory=80000000", own)
        with open(self._scratch / f"{host}.log", "ab") as log:
            self._nodes[host] = subprocess.Popen([*command, *options], stdout=log, stderr=log, start_new_session=True)


@contextmanager
def cut(host: str) -> Iterator[None]:
    run("ip", "link", "set", f"to-{host}", "down")
    try:
        yield
    finally:
        run("ip", "link", "set", f"to-{host}", "up")


@contextmanager
def narrow(host: str) -> Iterator[None]:
    link = ("dev", f"to-{host}", "root")
    run("tc", "qdisc", "add", *link, "tbf", "rate", "2mbit", "burst", "64kb", "latency", "300ms")
    try:
        yield
    finally:
        run("tc", "qdisc", "del", *link)


@contextmanager
def lossy(host: str) -> Iterator[None]:
    rule = "add rule inet loss in numgen random mod 100 < 15 drop"
    run(
        *inside(
            host,
            "nft",
            f"add table inet loss; add chain inet loss in {{ type filter hook input priority 0; }}; {rule};",
        )
    )
    try:
        yield
    finally:
        run(*inside(host, "nft", "delete table inet loss"))


KINDS: dict[str, Callable[[str], Any]] = {"link cut": cut, "narrow link": narrow, "packets lost": lossy}


class Saboteur:
    """Strikes one host after the other in a thread, from the first training step until the run ends."""

    def __init__(self, cluster: Cluster, seed: int, limit: int, kinds: tuple[str, ...]) -> None:
        self.kinds = Counter[str]()
        self._cluster, self._rng, self._limit, self._choice = cluster, random.Random(seed), limit, kinds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike_all, daemon=True)

    def see(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone) and not self._thread.ident:
            self._thread.start()

    def end(self) -> None:
        self._over.set()
        if self._thread.ident:
            self._thread.join(120)

    def _strike_all(self) -> None:
        while self.kinds.total() < self._limit and not self._over.is_set():
            host, kind = self._rng.choice(list(DEVICES)), self._choice[self.kinds.total() % len(self._choice)]
            seconds = LONG_S if kind == "node given up" else self._rng.uniform(*SHORT_S)
            print(f"{kind}: {host} ({DEVICES[host]}), {seconds:.1f} s", flush=True)
            with KINDS.get(kind, cut)(host):
                self._over.wait(seconds)
            if kind == "node given up":
                self._cluster.leave(host)
                self._cluster.join(host)
            self.kinds[kind] += 1
            self._over.wait(self._rng.expovariate(1 / GAP_S))


def faults(steps: int, seed: int, limit: int, kinds: tuple[str, ...], scratch: Path) -> dict[str, Any]:
    connect_hosts()
    cluster = Cluster(scratch)
    saboteur = Saboteur(cluster, seed, limit, kinds)
    with ExitStack() as stack:
        stack.callback(cluster.end)
        stack.callback(saboteur.end)
        cluster.start()
        train(run_file(f"{address(HEAD)}:{PORT}", steps), scratch, saboteur.see, inside(HEAD))
    violations = [f"{each.invariant}: {each.what}" for each in audit(scratch / "run")]
    found = {"faults": saboteur.kinds.total(), "kinds": dict(saboteur.kinds), "violations": len(violations)}
    return {**found, "seen": violations[:5], **accounts(scratch / "run", steps)}


def enter_own_world() -> bool:
    """Start again with a network and mounts of its own. False where that is not allowed."""
    private = ["unshare", "--net", "--mount"]
    tools = all(shutil.which(tool) for tool in ("unshare", "ip", "tc", "nft"))
    if not tools or not _succeeds(*private, "true"):
        return False
    with scratch_folder("hosts") as scratch:
        command = [*private, sys.executable, "-m", "benchmarks.hosts", *sys.argv[1:]]
        again = subprocess.run(command, env=os.environ | {OWN_WORLD: str(scratch)}, check=False)
        if again.returncode:
            raise SystemExit(again.returncode)
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--faults", type=int, default=16, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one short cut, to check that it runs")
    options = parser.parse_args()
    if OWN_WORLD in os.environ:
        steps, limit, kinds = options.steps, options.faults, (*KINDS, "node given up")
        if options.smoke:
            steps, limit, kinds = 8, 1, ("link cut",)
        print(json.dumps(faults(steps, options.seed, limit, kinds, Path(os.environ[OWN_WORLD]))))
    elif not enter_own_world():
        print(json.dumps({"skipped": "it needs root, unshare, ip, tc and nft"}))
