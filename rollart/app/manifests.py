"""What starts a run on a cluster: a SLURM batch script, a RayJob of KubeRay, or the command of a Ray job.

The nodes follow from the pools of the run file: each device class needs as many nodes as its workers fill. The first
two start Ray nodes labelled with their device class, by which rollart places workers, and continue a
run that was interrupted.
"""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollart.config import RunFile
from rollart.core.errors import ConfigError

DEVICE_LABEL = "rollart.io/device"
RAY_PORT = 6379
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`nodes` nodes with `devices` devices of one class each; of CPUs, whole nodes."""

    device: str
    nodes: int
    devices: int

    @property
    def gpus(self) -> int:
        return 0 if self.device == CPU else self.devices


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What a node of the cluster has. `memory` is in GB."""

    gpus: int = 8
    cpus: int = 64
    memory: int = 256


def node_groups(run: RunFile, shape: NodeShape) -> list[NodeGroup]:
    """GPU nodes by class, the trainer's first: the controller runs on the first node. Raises ConfigError."""
    wanted: dict[str, int] = {}
    pools = sorted(run.all_pools().items(), key=lambda pool: pool[1].role != "train")
    for name, pool in pools:
        if pool.urls:
            continue  # someone else runs them
        if pool.auto:
            raise ConfigError(f"pools.{name}.device is auto; name a device class, so that its nodes can be requested")
        device = CPU if pool.emulate else pool.devices[0]
        wanted[device] = wanted.get(device, 0) + pool.takes
    groups = [_group(device, count, shape.gpus) for device, count in wanted.items() if device != CPU]
    return groups or [NodeGroup(CPU, 1, shape.cpus)]


def _group(device: str, count: int, per_node: int) -> NodeGroup:
    nodes = math.ceil(count / per_node)
    return NodeGroup(device, nodes, math.ceil(count / nodes))


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A run file with its `overrides`, as the commands of a manifest name it."""

    run: RunFile
    file: Path
    overrides: tuple[str, ...] = ()

    def command(self, verb: str, cluster: str, file: str | None = None) -> str:
        changes = [f"--set {shlex.quote(change)}" for change in self.overrides]
        return " ".join([f"rollart {verb} {shlex.quote(file or str(self.file))}", *changes, f"--set cluster={cluster}"])

    def train(self, cluster: str, folder: str, file: str | None = None) -> str:
        """Trains, or continues what an interrupted job left in `folder`."""
        there = shlex.quote(folder)
        resume = f'$([ -e {there}/ledger.sqlite ] && echo "--resume")'
        return f"{self.command('train', cluster, file)} --run-dir {there} {resume}"


def ray_job(launched: LaunchedRun, address: str) -> str:
    """The shell command that submits the run to a Ray cluster; the current folder goes with it. Ray deletes its copy of
    the folder when it likes, so the run is written to the path that the output has here."""
    train = f"{launched.command('train', 'auto')} --output {shlex.quote(str(launched.run.output.absolute()))}"
    return f"ray job submit --address {shlex.quote(address)} --working-dir . -- {train}"


def slurm(launched: LaunchedRun, groups: list[NodeGroup], *, hours: float, partition: str | None) -> str:
    """A batch script; several device classes make a heterogeneous job. A requeued job continues the run."""
    run, cluster = launched.run, f"$address:{RAY_PORT}"
    minutes = math.ceil(hours * 60)
    directives = [f"--job-name={run.name}", f"--time={minutes // 60}:{minutes % 60:02d}:00"]
    directives += ["--requeue", "--signal=B:INT@120", *([f"--partition={partition}"] if partition else [])]
    for number, group in enumerate(groups):
        gpus = [f"--gpus-per-node={group.device.lower()}:{group.gpus}"] if group.gpus else []
        directives += ["hetjob"] * bool(number)
        directives += [" ".join([f"--nodes={group.nodes}", "--ntasks-per-node=1", "--exclusive", *gpus])]
    several = len(groups) > 1
    lists = [f"SLURM_JOB_NODELIST{f'_HET_GROUP_{number}' if several else ''}" for number in range(len(groups))]
    starts = [
        _slurm_start(group, f"--het-group={number} " if several else "", nodes, first=number == 0)
        for number, (group, nodes) in enumerate(zip(groups, lists, strict=True))
    ]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {directive}" for directive in directives),
            "# Submit it with sbatch in the folder of the run file. Every node needs rollart[ray] on its PATH.",
            "set -euo pipefail",
            f'head=$(scontrol show hostnames "${lists[0]}" | head -n 1)',
            'address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | cut -d " " -f 1)',
            "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT",
            *starts,
            "for attempt in $(seq 60); do  # until every worker of the run file fits on the nodes that have joined",
            f"  if problem=$({launched.command('check', cluster)} 2>&1 >/dev/null); then break; fi",
            '  if [ "$attempt" = 60 ]; then echo "the nodes did not join: $problem" >&2; exit 1; fi',
            "  sleep 5",
            "done",
            launched.train(cluster, f"{run.output}/{run.name}-slurm"),
            "",
        ]
    )


def _slurm_start(group: NodeGroup, het: str, nodes: str, *, first: bool) -> str:
    step = f"srun {het}--ntasks-per-node=1"
    label = f"--labels={DEVICE_LABEL}={group.device} --block"
    if not first:
        return f'{step} --nodes={group.nodes} ray start --address="$address:{RAY_PORT}" {label} &'
    start = f'{step} --nodes=1 -w "$head" ray start --head --port={RAY_PORT} {label} &'
    if group.nodes == 1:
        return start
    rest = f'{step} --nodes={group.nodes - 1} --exclude="$head" ray start --address="$address:{RAY_PORT}" {label} &'
    return f"{start}\nsleep 10  # the head must listen before the others join\n{rest}"


def local_files(run: RunFile) -> list[str]:
    """Files and folders under the current one that the run names: models, data, and modules of environments, agents
    and rewards."""
    named = [run.model.path]
    for task in run.tasks:
        targets = [task.env, task.player, task.reward.function, task.agent.function if task.agent else None]
        modules = [target.partition(":")[0].partition(".")[0] for target in targets if target]
        named += [Path(f"{module}{end}") for module in modules if module != "rollart" for end in ("", ".py")]
        named += [Path(task.dataset.path)] if task.dataset else []
        named += [task.agent.files] if task.agent else []
    here = [path for path in named if path is not None and not path.is_absolute() and path.exists()]
    return sorted({str(path) for path in here})


def kubernetes(launched: LaunchedRun, groups: list[NodeGroup], *, shape: NodeShape, image: str, claim: str) -> str:
    """A ConfigMap with the run file and a RayJob. Nodes are chosen by the label `rollart.io/device`."""
    name = launched.run.name.lower().replace("_", "-").replace(".", "-")
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-run"},
        "data": {"run.yaml": launched.file.read_text(encoding="utf-8")},
    }
    pods = [_pod(group, f"{name}-run", shape=shape, image=image, claim=claim) for group in groups]
    workers = [
        {
            "groupName": group.device.lower(),
            "replicas": group.nodes - (number == 0),
            "minReplicas": group.nodes - (number == 0),
            "maxReplicas": group.nodes - (number == 0),
            "rayStartParams": {"labels": f"{DEVICE_LABEL}={group.device}"},
            "template": pod,
        }
        for number, (group, pod) in enumerate(zip(groups, pods, strict=True))
        if group.nodes > (number == 0)
    ]
    command = launched.train("auto", f"/output/{name}", "/run/rollart/run.yaml")
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"bash -c {shlex.quote(command)}",
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 3,
            "rayClusterSpec": {
                "headGroupSpec": {
                    "rayStartParams": {"labels": f"{DEVICE_LABEL}={groups[0].device}"},
                    "template": pods[0],
                },
                "workerGroupSpecs": workers,
            },
        },
    }
    files = local_files(launched.run)
    note = f"# The image must have these files in its working directory: {', '.join(files)}\n" if files else ""
    return note + yaml.dump_all([config, job], Dumper=_Manifest, sort_keys=False, width=120)


class _Manifest(yaml.SafeDumper):
    """Without anchors, and with texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Manifest.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _pod(group: NodeGroup, config: str, *, shape: NodeShape, image: str, claim: str) -> dict[str, Any]:
    resources = {"cpu": str(shape.cpus), "memory": f"{shape.memory}Gi"}
    if group.gpus:
        resources["nvidia.com/gpu"] = str(group.gpus)
    mounts = {"/run/rollart": "run", "/output": "output", "/dev/shm": "shm"}  # published weights are in shared memory
    return {
        "spec": {
            "nodeSelector": {DEVICE_LABEL: group.device},
            "containers": [
                {
                    "name": "ray",
                    "image": image,
                    "resources": {"limits": resources, "requests": dict(resources)},
                    "volumeMounts": [{"name": volume, "mountPath": path} for path, volume in mounts.items()],
                }
            ],
            "volumes": [
                {"name": "run", "configMap": {"name": config}},
                {"name": "output", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},
            ],
        }
    }
