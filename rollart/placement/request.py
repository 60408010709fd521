"""What a pool requests of placement, and the error message when there is no room."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby

from rollart.core.errors import ConfigError
from rollart.launch.launcher import Node
from rollart.placement.inventory import Inventory

# In the order of placement.
ROLES = {"train": "rank", "generate": "engine", "environment": "environment host"} | {
    role: role for role in ("teacher", "judge")
}


class PlacementError(ConfigError):
    """There is no room for a pool; `pool` is the first that does not fit."""

    def __init__(self, message: str, pool: str) -> None:
        super().__init__(message)
        self.pool = pool


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Device classes in order of preference, and why."""

    devices: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """`workers` of one pool, on the classes of `choices` in order of preference. A worker takes `devices` of one node,
    or on CPUs `devices` x `threads`. `why` explains choices that the user did not name."""

    pool: str
    role: str
    workers: int
    choices: tuple[str, ...]
    threads: int = 1
    why: str = ""
    devices: int = 1

    def takes(self, device: str) -> float:
        return float(self.devices * (self.threads if device == "cpu" else 1))


def refusal_of(
    request: PlacementRequest, placed: int, fitting: int, inventory: Inventory, taken: Mapping[str, Counter[str]]
) -> str:
    """`placed` of its workers fit after other pools have `taken` devices; with `fitting` workers, all pools would."""
    classes = " or ".join(request.choices)
    each = f" of {request.threads} threads each" if "cpu" in request.choices and request.threads > 1 else ""
    if request.devices > 1:
        each = f", {request.devices} of one node for each{each}"
    unit = ROLES[request.role] + ("s" if request.workers > 1 else "")
    if request.workers > 1:
        room = f"there is room for {placed}" if placed else "there is room for none of them"
    else:
        room = "there is no room for it"
    if request.role == "train" and len(request.choices) > 1:
        room += " on devices of one class, which ranks need because they wait for each other"
    lines = [
        f"pool {request.pool!r} wants {request.workers} {unit} on {classes}{each}, but {room}.",
        f"  There is, in {inventory.where}: " if inventory.where != "this machine" else "  This machine has: ",
    ]
    lines[-1] += "; ".join(described(inventory.nodes)) or "nothing"
    shares = [
        f"{number} {device} by {pool}"
        for device in sorted(taken, key=lambda name: (name not in request.choices, name))
        for pool, number in taken[device].items()
    ]
    if shares:
        lines.append(f"  Taken already: {', '.join(shares)}.")
    return "\n".join([*lines, f"  What to do: {'; or '.join(_remedies(request, placed, fitting, inventory, taken))}."])


def described(nodes: Iterable[Node]) -> list[str]:
    """Each node with its devices; nodes with the same devices share a line."""

    def devices(node: Node) -> str:
        has = []
        for name in sorted(node.total, key=lambda name: (name == "cpu", name)):
            free, total = node.free.get(name, 0.0), node.total[name]
            has.append(f"{total:g} {name}" + (f" ({free:g} free)" if free < total else ""))
        return ", ".join(has) or "no devices"

    groups = groupby(sorted(nodes, key=lambda node: (devices(node), node.name)), key=devices)
    lines = []
    for what, alike in groups:
        names = [node.name for node in alike]
        who = names[0] if len(names) == 1 else f"{len(names)} nodes such as {names[0]}"
        lines.append(f"{who}: {what}")
    return lines


def _remedies(
    request: PlacementRequest, placed: int, fitting: int, inventory: Inventory, taken: Mapping[str, Counter[str]]
) -> list[str]:
    """What would help, the smallest change first."""
    key, first, remedies = f"pools.{request.pool}", request.choices[0], []
    if fitting:
        remedies.append(f"set {key}.count to {fitting}")
    needed = request.devices * (request.workers - (0 if request.role == "train" else placed))
    left = {name: inventory.free(name) - sum(taken.get(name, {}).values()) for name in inventory.classes}
    spare = [name for name in left if name != "cpu" and name not in request.choices and left[name] >= needed]
    if spare and request.role != "environment":
        best = max(spare, key=lambda name: left[name])
        listed = ", ".join([*request.choices, best])
        remedies.append(f"allow a fallback, {key}.device: [{listed}] ({left[best]:g} {best} are free)")
    if "cpu" not in request.choices and request.role == "generate":
        remedies.append(f"try it without such devices, {key}: {{device: {first}, emulate: 20000, ...}}")
    if inventory.overcommit:
        remedies.append(f"use this machine's CPUs with {key}.device: cpu")
        remedies.append(f"name a `cluster` that has {first}")
    else:
        remedies.append(f"add nodes with {first}")
    if "cpu" in request.choices:
        remedies.append("remove `cluster`: on this machine CPUs may be shared")
    return remedies
