"""Hosts are network namespaces: links are cut, narrowed, slow and lose packets under a real run on Ray.

Eight hosts on one bridge: the controller beside Ray's head, a trainer, two engines that train as well if they must, two
hosts of environments, and two engines that the run does not start but reaches by their URLs. Each has an address and a
shared memory of its own, so requests, batches and weights cross the links; the publisher sends a version to two of the
four engines, which relay it to the others. In turn, from a seed, the link of one host is down for some seconds, or for
so long that it is given up and its host starts again, has a narrow rate, drops packets, or delays them; the controller
is cut off for seconds only. Then the auditor of `chaos.py` reads what the run left.

Needs root. Last line: `faults` by `kinds` and by `hosts`, `violations`, `finished`, `lost_trajectories`,
`trained_twice`, outcomes; `url_turns` by each engine that was reached by its URL, `url_losses` of their connections;
megabytes of weights `from_publisher` and `from_relays`.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.audit import audit
from benchmarks.host_links import KINDS, address, connect_hosts, cut, inside, kill_all, succeeds, with_own_memory
from benchmarks.ray_faults import TINY, accounts, run_file, train
from benchmarks.scratch import scratch_folder
from rollart.config import TinyModelConfig
from rollart.core.event_log import read_events
from rollart.core.events import AnyEvent, EngineSwapped, ServiceEnded, StepDone, TurnDone
from rollart.launch.rpc import ENGINE_KEY
from rollart.models.tiny import make

HEAD = "host0"
NODES = {"host1": "H800", "host2": "H20", "host3": "H20", "host4": "cpu", "host5": "cpu"}
URL_ENGINES = {"host6": "H20", "host7": "H20"}
DEVICES = NODES | URL_ENGINES
PORT, ENGINE_PORT = 6379, 9000
# Ray gives a node up after ten seconds without an answer.
HEALTH = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 20}
START_S = 180.0
SHORT_S, LONG_S, GAP_S = (1.0, 5.0), 15.0, 5.0
GIVEN_UP = "host given up"
OWN_WORLD = "ROLLART_HOSTS"


class Machines:
    """What runs on each host: a node of Ray, or an engine with a URL. `restart` does what a reboot does."""

    def __init__(self, scratch: Path, model: Path, key: str) -> None:
        self._scratch, self._model, self._key = scratch, model, key
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for host in URL_ENGINES:
            self._engine(host)
        own = (
            "--include-dashboard=false",
            f"--temp-dir={self._scratch / 'ray'}",
            f"--system-config={json.dumps(HEALTH)}",
        )
        self._node(HEAD, "--head", f"--port={PORT}", "--num-cpus=0", *own)
        self._wait_for(1)
        for number, host in enumerate(NODES, 2):  # at once, they would claim the same files of this machine
            self._join(host)
            self._wait_for(number)

    def _wait_for(self, nodes: int) -> None:
        look = f"import ray; ray.init('{address(HEAD)}:{PORT}'); exit(len(ray.nodes()) < {nodes})"
        deadline = time.monotonic() + START_S
        while not succeeds(*inside(HEAD, sys.executable, "-c", look)):
            if time.monotonic() > deadline:
                raise SystemExit(f"no {nodes} nodes of Ray within {START_S:g} s; see {self._scratch}")
            time.sleep(1)

    def restart(self, host: str) -> None:
        self._end(host)
        self._engine(host) if host in URL_ENGINES else self._join(host)

    def end(self) -> None:
        for host in list(self._processes):
            self._end(host)

    def _end(self, host: str) -> None:
        kill_all(host)
        self._processes.pop(host).wait(30)

    def _join(self, host: str) -> None:
        labels = f"--labels=rollart.io/device={NODES[host]}"
        self._node(host, f"--address={address(HEAD)}:{PORT}", "--num-cpus=2", labels)

    def _node(self, host: str, *options: str) -> None:
        ray = str(Path(sys.executable).parent / "ray")
        own = f"--node-ip-address={address(host)}"
        self._run(host, ray, "start", "--block", "--object-store-memory=80000000", own, *options)

    def _engine(self, host: str) -> None:
        spec = {
            "model": str(self._model),
            "version": 0,
            "seed": 0,
            "config": {"device": "cpu"},
            "weights": f"/dev/shm/{host}",
            "bind": address(host),
            "port": ENGINE_PORT,
            "key": self._key,
        }
        process = self._run(host, sys.executable, "-m", "rollart.engines.torch.service")
        assert process.stdin is not None
        process.stdin.write(json.dumps(spec).encode() + b"\n")  # left open: the engine ends with it
        process.stdin.flush()

    def _run(self, host: str, *command: str) -> subprocess.Popen[bytes]:
        inner = inside(host, *command) if host == HEAD else with_own_memory(host, *command)
        with open(self._scratch / f"{host}.log", "ab") as log:
            self._processes[host] = subprocess.Popen(
                inner, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        return self._processes[host]


class Saboteur:
    """Strikes one host after the other in a thread, from the first training step until the run ends: all of them, then
    all again in another order."""

    def __init__(self, machines: Machines, seed: int, limit: int, kinds: tuple[str, ...]) -> None:
        self.kinds, self.hosts = Counter[str](), Counter[str]()
        self._machines, self._rng, self._limit = machines, random.Random(seed), limit
        self._choice, self._left, self._over = kinds, list[str](), threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._striking: Future[None] | None = None

    def see(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone) and self._striking is None:
            self._striking = self._thread.submit(self._strike_all)

    def end(self) -> None:
        self._over.set()
        if self._striking is not None:
            self._striking.result(120)

    def _strike_all(self) -> None:
        while self.kinds.total() < self._limit and not self._over.is_set():
            kind = self._choice[self.kinds.total() % len(self._choice)]
            self._strike(self._next_host(kind), kind)
            self._over.wait(self._rng.expovariate(1 / GAP_S))

    def _next_host(self, kind: str) -> str:
        able = [host for host in self._left if host != HEAD or kind != GIVEN_UP]
        if not able:
            self._left = able = list(DEVICES) if kind == GIVEN_UP else [HEAD, *DEVICES]
        host = self._rng.choice(able)
        self._left.remove(host)
        return host

    def _strike(self, host: str, kind: str) -> None:
        seconds = LONG_S if kind == GIVEN_UP else self._rng.uniform(*SHORT_S)
        print(f"{kind}: {host} ({DEVICES.get(host, 'controller')}), {seconds:.1f} s", flush=True)
        with KINDS.get(kind, cut)(host):
            self._over.wait(seconds)
        if kind == GIVEN_UP:
            self._machines.restart(host)
        self.kinds[kind] += 1
        self.hosts[host] += 1


def crossed(log: Path) -> dict[str, Any]:
    """What engines with a URL did, and where weights came from."""
    turns, losses, fetched = Counter[str](), Counter[str](), Counter[str]()
    relays = {event.relay for event in read_events(log, EngineSwapped)}
    for event in read_events(log, TurnDone, ServiceEnded, EngineSwapped):
        match event:
            case TurnDone() if event.engine.startswith("partner"):
                turns[event.engine] += 1
            case ServiceEnded() if event.name.startswith("partner"):
                losses[event.name] += 1
            case EngineSwapped():
                for hop in event.hops:
                    fetched["from_relays" if hop.source in relays else "from_publisher"] += hop.bytes
    return {
        "url_turns": dict(turns),
        "url_losses": dict(losses),
        **{source: round(fetched[source] / 1e6, 1) for source in ("from_publisher", "from_relays")},
    }


def faults(steps: int, seed: int, limit: int, kinds: tuple[str, ...], scratch: Path) -> dict[str, Any]:
    connect_hosts((HEAD, *DEVICES))
    key = os.environ[ENGINE_KEY] = uuid.uuid4().hex
    model = make(TinyModelConfig.model_validate(TINY), scratch / "model", seed=seed)
    machines = Machines(scratch, model, key)
    saboteur = Saboteur(machines, seed, limit, kinds)
    urls = [f"http://{address(host)}:{ENGINE_PORT}" for host in URL_ENGINES]
    pools = {"partner": {"role": "generate", "device": "H20", "urls": urls}}
    with ExitStack() as stack:
        stack.callback(machines.end)
        stack.callback(saboteur.end)
        machines.start()
        train(run_file(f"{address(HEAD)}:{PORT}", steps, pools, model), scratch, saboteur.see, inside(HEAD))
    violations = [f"{each.invariant}: {each.what}" for each in audit(scratch / "run")]
    return {
        "faults": saboteur.kinds.total(),
        "kinds": dict(saboteur.kinds),
        "hosts": dict(sorted(saboteur.hosts.items())),
        "violations": len(violations),
        "seen": violations[:5],
        **crossed(scratch / "run" / "events"),
        **accounts(scratch / "run", steps),
    }


def enter_own_world() -> bool:
    """Start again with a network and mounts of its own. False where that is not allowed."""
    private = ["unshare", "--net", "--mount"]
    tools = all(shutil.which(tool) for tool in ("unshare", "ip", "tc", "nft"))
    if not tools or not succeeds(*private, "true"):
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
    parser.add_argument("--faults", type=int, default=20, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one short fault, to check that it runs")
    options = parser.parse_args()
    if OWN_WORLD in os.environ:
        steps, limit, kinds = options.steps, options.faults, (*KINDS, GIVEN_UP)
        if options.smoke:
            steps, limit, kinds = 8, 1, ("packets delayed" if "packets delayed" in KINDS else "link cut",)
        print(json.dumps(faults(steps, options.seed, limit, kinds, Path(os.environ[OWN_WORLD]))))
    elif not enter_own_world():
        print(json.dumps({"skipped": "it needs root, unshare, ip, tc and nft"}))
