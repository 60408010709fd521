"""Nodes of a Ray cluster die and join while a real training run goes on.

The cluster is fake in one way only: its nodes (a bare head, then H800, H20, H20 and two cpu nodes by label) are
processes of this machine. Trainer, engines and environment hosts run on them as on any other. In turn the node of an
engine, of environments and of the trainer is killed, and each time a new node of the same class joins.

Last line: `recovery_s` from the kill until work is done again by the replacement (a turn by the new engine, a host that
is up, a training step), `lost_trajectories` that were started and never ended with an outcome, `trained_twice`, and the
outcomes.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster

from benchmarks.crash import surviving
from benchmarks.scratch import scratch_folder
from rollart.config import RunFile, loading
from rollart.core import event_log
from rollart.core.event_log import read_events
from rollart.core.events import AnyEvent, Placed, StepDone, TrajectoryEnded, TrajectoryStarted, TurnDone

TINY = {"hidden": 64, "layers": 2, "context": 256}
NODE = {"object_store_memory": 80_000_000, "include_dashboard": False}
# A dead node is noticed after about (failures x period); the defaults add up to far longer.
HEALTH = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
ROLES = ("generate", "environment", "train")
APART_STEPS = 4
DEADLINE = 900.0


def run_file(address: str, steps: int, pools: Mapping[str, Any] | None = None, model: Path | None = None) -> RunFile:
    """`pools` come beside those that the nodes serve; `model` is a folder in place of a new tiny model."""
    small: dict[str, Any] = {"max_turns": 4, "max_context": 200, "sampling": {"max_tokens": 6}}
    return RunFile.model_validate(
        {
            "name": "ray-faults",
            "cluster": address,
            "model": {"tiny": TINY} if model is None else {"path": str(model)},
            "tasks": [
                {"name": "guess_number", "env": "rollart.envs.guess_number:GuessNumber", **small},
                {"name": "frozen_lake", "env": "rollart.envs.frozen_lake:FrozenLake", **small},
            ],
            "pools": {
                "learning": {"role": "train", "device": ["H800", "H20"], "count": 2},
                "talking": {"role": "generate", "device": "H20", "count": 2},
                "playing": {"role": "environment", "device": "cpu", "count": 2},
                **(pools or {}),
            },
            "rollout": {"extra_members": 1},
            "engine": {"device": "cpu"},  # the labels are for show: there is no GPU behind them
            "training": {"steps": steps, "batch_groups": 6, "group_size": 4, "device": "cpu"},
            "environments": {"processes": 16},
            "evaluation": {"every": 0, "final_episodes": 2},
            "checkpoint": {"every": 2},
        }
    )


class Saboteur:
    """Follows the event log of the run. Every few steps it kills the node of the next role, once the last one has been
    replaced."""

    def __init__(self, cluster: Cluster, nodes: dict[str, list[Any]], roles: Sequence[str]) -> None:
        self.cluster, self.nodes = cluster, nodes
        self.recovery: dict[str, float] = {}
        self.placed: dict[str, Placed] = {}
        self.roles = list(roles)
        self.role: str | None = None
        self.victims: set[str] = set()
        self.returned: set[str] = set()
        self.killed_at = 0.0
        self.next_at = APART_STEPS

    def see(self, event: AnyEvent) -> None:
        match event:
            case Placed():
                self.placed[event.name] = event
                if self.role == event.role and event.name in self.victims:
                    self.returned.add(event.name)
                    if event.role == "environment" and self.returned == self.victims:
                        self.recovered()
            case TurnDone() if self.role == "generate" and event.engine in self.returned:
                self.recovered()
            case StepDone():
                if self.role == "train" and self.returned:
                    self.recovered()
                elif self.role is None and self.roles and event.version >= self.next_at:
                    self.next_at = event.version
                    self.strike(self.roles.pop(0))

    def recovered(self) -> None:
        assert self.role is not None
        self.recovery[self.role] = round(time.monotonic() - self.killed_at, 2)
        print(f"{self.role}: works again after {self.recovery[self.role]} s", flush=True)
        self.role = None
        self.next_at += APART_STEPS

    def strike(self, role: str) -> None:
        name = next(placed.node for placed in self.placed.values() if placed.role == role)
        self.role, self.returned = role, set()
        self.victims = {one for one, placed in self.placed.items() if placed.node == name and placed.role == role}
        device, node = next(
            (device, node) for device, nodes in self.nodes.items() for node in nodes if name.endswith(node.node_id[:6])
        )
        self.nodes[device].remove(node)
        print(f"killing {name} ({device}) with {', '.join(sorted(self.victims))}", flush=True)
        self.killed_at = time.monotonic()
        self.cluster.remove_node(node, allow_graceful=False)
        self.nodes[device].append(add(self.cluster, device))


def add(cluster: Cluster, device: str) -> Any:
    return cluster.add_node(num_cpus=2, labels={"rollart.io/device": device}, **NODE)


def follow(log: Path, process: subprocess.Popen[bytes]) -> Iterator[AnyEvent]:
    """The events as they are written, until the process has ended."""
    deadline = time.monotonic() + DEADLINE

    def over() -> bool:
        if time.monotonic() > deadline:
            raise SystemExit(f"the run did not end within {DEADLINE:g} s")
        return process.poll() is not None

    return event_log.follow(log, over)


def faults(steps: int, scratch: Path, roles: Sequence[str] = ROLES) -> dict[str, Any]:
    with cluster_of(("H800", "H20", "H20", "cpu", "cpu")) as (cluster, nodes):
        saboteur = Saboteur(cluster, nodes, roles)
        train(run_file(cluster.address, steps), scratch, saboteur.see)
    return {"recovery_s": saboteur.recovery, **accounts(scratch / "run", steps)}


@contextmanager
def cluster_of(devices: Sequence[str]) -> Iterator[tuple[Cluster, dict[str, list[Any]]]]:
    """A cluster with a bare head and a node for each of `devices`; the nodes by device."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": HEALTH, **NODE})
    try:
        nodes: dict[str, list[Any]] = {}
        for device in devices:
            nodes.setdefault(device, []).append(add(cluster, device))
        yield cluster, nodes
    finally:
        cluster.shutdown()


def train(run: RunFile, scratch: Path, see: Callable[[AnyEvent], None], inside: Sequence[str] = ()) -> None:
    """The run as a user starts it, in `scratch`; `see` gets its events as they are written. `inside` is a command that
    starts it elsewhere."""
    folder, file = scratch / "run", scratch / "run.yaml"
    file.write_text(loading.dump(run))
    command = [*inside, sys.executable, "-m", "rollart.app.cli", "train", str(file), "--run-dir", str(folder), "--json"]
    with open(scratch / "out", "wb") as out, open(scratch / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=out, stderr=log)
    try:
        for event in follow(folder / "events", process):
            see(event)
    finally:
        process.terminate()
        process.wait(60)
    if process.returncode:
        print((scratch / "log").read_text()[-3000:])


def accounts(folder: Path, steps: int) -> dict[str, Any]:
    """What became of the trajectories of a run."""
    summary = json.loads((folder / "summary.json").read_text())
    batches, dropped = surviving(folder / "events")
    trained = Counter(group for ids in batches.values() for group in ids)
    started, ended = set(), Counter[str]()
    for event in read_events(folder / "events"):
        if isinstance(event, TrajectoryStarted):
            started.add(event.trajectory)
        elif isinstance(event, TrajectoryEnded):
            started.discard(event.trajectory)
            ended[event.outcome.value] += 1
    return {
        "lost_trajectories": len(started),
        "trained_twice": sum(count > 1 for count in trained.values()),
        "steps": summary["version"],
        "finished": summary["phase"] == "finished" and len(batches) == steps,
        "outcomes": dict(ended),
        "dropped_groups": len(dropped),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
    options = parser.parse_args()
    steps, roles = (10, ("environment",)) if options.smoke else (options.steps, ROLES)
    with scratch_folder("ray-faults") as folder:
        print(json.dumps(faults(steps, folder, roles)))
