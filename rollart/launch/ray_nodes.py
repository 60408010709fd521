"""The nodes of a Ray cluster, by device class.

A node's class is its label `rollart.io/device` (`ray start --labels rollart.io/device=H20`), else the accelerator that
Ray detected, else cpu. Its devices are its GPUs, or its CPUs if it has none. CPUs of nodes with GPUs come last.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollart.launch.launcher import Node, ResourceRequest

DEVICE, ACCELERATOR, NODE_ID = "rollart.io/device", "ray.io/accelerator-type", "ray.io/node-id"
Resource = Literal["GPU", "CPU"]


@dataclass(frozen=True, slots=True)
class RayNode:
    """One class of devices of a node, given by `label`, if any. `port` is Ray's; `second`: CPUs of a node with GPUs."""

    id: str
    name: str
    address: str
    port: int
    labels: Mapping[str, str]
    label: str | None
    device: str
    resource: Resource
    total: float
    free: float
    second: bool = False


def ray_nodes(listed: Iterable[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]) -> list[RayNode]:
    """The live nodes of `ray.nodes()`; `free` has their free resources."""
    alive = [(node, free.get(node["NodeID"], {})) for node in listed if node["Alive"]]
    second = [
        replace(_node(node, left, "CPU"), label=None, device="cpu", second=True)
        for node, left in alive
        if node["Resources"].get("GPU") and node["Resources"].get("CPU")
    ]
    return [_node(node, left, "GPU" if node["Resources"].get("GPU") else "CPU") for node, left in alive] + second


def described(nodes: Iterable[RayNode]) -> list[Node]:
    """Each node with all its classes."""
    merged: dict[str, Node] = {}
    for node in nodes:
        seen = merged.get(node.id, Node(node.name, node.address, {}, {}))
        total, free = {**seen.total, node.device: node.total}, {**seen.free, node.device: node.free}
        merged[node.id] = Node(node.name, node.address, total, free)
    return list(merged.values())


def _node(info: Mapping[str, Any], free: Mapping[str, float], resource: Resource) -> RayNode:
    labels, total = info["Labels"], info["Resources"]
    label = next((label for label in (DEVICE, ACCELERATOR) if labels.get(label)), None)
    return RayNode(
        id=info["NodeID"],
        name=f"{info['NodeName']}-{info['NodeID'][:6]}",  # several nodes may share a machine
        address=info["NodeManagerAddress"],
        port=info["NodeManagerPort"],
        labels=labels,
        label=label,
        device=labels[label] if label else "cpu",
        resource=resource,
        total=total.get(resource, 0.0),
        free=free.get(resource, 0.0),
    )


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """Nodes of one class that one label selector and one resource select in Ray."""

    device: str
    resource: Resource
    selector: Mapping[str, str]
    nodes: tuple[RayNode, ...]

    def holds(self, count: float, times: int = 1) -> bool:
        """Whether it could, if all were free."""
        return _times((node.total for node in self.nodes), count) >= times

    def has_room(self, count: float, times: int = 1) -> bool:
        """Whether it can now."""
        return _times((node.free for node in self.nodes), count) >= times


def _times(amounts: Iterable[float], count: float) -> int:
    return sum(int(amount / count + 1e-9) for amount in amounts)


def choices(request: ResourceRequest, nodes: Sequence[RayNode]) -> list[NodeChoice]:
    """In order of preference."""
    found = []
    for device in request.devices:
        suitable = [node for node in nodes if node.device == device and node.name not in request.avoid]
        for kind in dict.fromkeys((node.label, node.resource, node.second) for node in suitable):
            group = tuple(node for node in suitable if (node.label, node.resource, node.second) == kind)
            found.append(NodeChoice(device, kind[1], _selector(kind[0], device, group, nodes), group))
    return found


def _selector(label: str | None, device: str, group: Sequence[RayNode], nodes: Sequence[RayNode]) -> dict[str, str]:
    if label is None:
        return {NODE_ID: f"in({','.join(node.id for node in group)})"}
    labelled = dict.fromkeys(node.id for node in nodes if node.labels.get(label) == device)
    others = [each for each in labelled if each not in {node.id for node in group}]
    return {label: device} | ({NODE_ID: f"!in({','.join(others)})"} if others else {})
