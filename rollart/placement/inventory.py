"""The nodes to place workers on: this machine, a Ray cluster, or a file that describes one.

Listing a cluster never takes longer than the `patience`: a child process does it (`python -m` this module), because a
connection to Ray that hangs can only be killed.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rollart.config import RunFile
from rollart.config.yaml_tree import dotted, parse
from rollart.core.errors import ConfigError, RollartError, ServiceError
from rollart.launch.launcher import Launcher, Node
from rollart.launch.local import LocalLauncher

PATIENCE = 3.0


@dataclass(frozen=True, slots=True)
class Inventory:
    """The `nodes` of `where`. `overcommit`: threads may outnumber the cores, as on a laptop."""

    nodes: tuple[Node, ...]
    where: str
    overcommit: bool = False

    def free(self, device: str) -> float:
        return sum(node.free.get(device, 0.0) for node in self.nodes)

    def total(self, device: str) -> float:
        return sum(node.total.get(device, 0.0) for node in self.nodes)

    @property
    def classes(self) -> list[str]:
        """Device classes with at least one device, `cpu` last."""
        found = {name for node in self.nodes for name, number in node.total.items() if number > 0}
        return sorted(found, key=lambda name: (name == "cpu", name))


def inventory_of(run: RunFile, file: Path | None = None, patience: float = PATIENCE) -> Inventory:
    """The nodes of `file`, of the cluster that the run file names, or this machine. Raises RollartError."""
    if file is not None:
        return Inventory(read(file), str(file))
    if run.cluster is None:
        return Inventory(asyncio.run(_list_nodes(LocalLauncher())), "this machine", overcommit=True)
    return Inventory(nodes_of(run.cluster, patience), f"the cluster {run.cluster}")


def nodes_of(address: str, patience: float = PATIENCE) -> tuple[Node, ...]:
    """The nodes of a Ray cluster, within `patience` seconds. Raises ServiceError."""
    until = time.monotonic() + patience
    remedies = "or remove `cluster` to run on this machine, or plan without one with `rollart check --nodes FILE`"
    if find_spec("ray") is None:
        raise ServiceError(
            f"cluster: {address} needs Ray, which is not installed: pip install 'rollart[ray]', {remedies}"
        )
    silent = f"cluster: no Ray cluster answers at {address}; start one with `ray start --head`, {remedies}"
    if not _listens(address, patience / 2):
        raise ServiceError(silent)
    command = [sys.executable, "-m", __name__, address]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=max(0.0, until - time.monotonic()), check=False
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(
            f"cluster: {address} accepts connections but did not list its nodes within {patience:g} s; if it is a Ray "
            f"cluster, give it longer with `rollart check --patience {4 * patience:g}`, {remedies}"
        ) from None
    if result.returncode:
        reason = result.stderr.strip().splitlines() or ["no reason given"]
        raise ServiceError(f"{silent} ({reason[-1]})")
    return tuple(Node(**node) for node in json.loads(result.stdout.splitlines()[-1]))


def _listens(address: str, deadline: float) -> bool:
    """Whether the port accepts connections; `auto` has none to try."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname is None or parts.port is None:
        return True
    try:
        socket.create_connection((parts.hostname, parts.port), deadline).close()
    except OSError:
        return False
    return True


async def _list_nodes(launcher: Launcher) -> tuple[Node, ...]:
    try:
        return tuple(await launcher.nodes())
    finally:
        await launcher.close()


class _NodeFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    devices: dict[str, Annotated[float, Field(ge=0)]]
    count: Annotated[int, Field(ge=1)] = 1


_NODES = TypeAdapter(list[_NodeFile])


def read(file: Path) -> tuple[Node, ...]:
    """A list of {name, devices: {H800: 8, cpu: 64}}; with `count`, several of the same. Raises ConfigError."""
    try:
        tree = parse(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the nodes in {file}: {error}") from None
    try:
        listed = _NODES.validate_python(tree.value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place, key = tree.place(first["loc"]), dotted(first["loc"], tree.value)
        raise ConfigError(
            f"{place}: {key or 'the file'}: {first['msg']}; write a list of nodes such as "
            "`- {name: node-a, devices: {H800: 8, cpu: 64}}`, with `count: 4` for four of them"
        ) from None
    names = [f"{node.name}-{n}" if node.count > 1 else node.name for node in listed for n in range(node.count)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{file}: two nodes are named {min(twice)!r}; names must differ")
    devices: list[dict[str, Any]] = [dict(node.devices) for node in listed for _ in range(node.count)]
    return tuple(Node(name, "", each, each) for name, each in zip(names, devices, strict=True))


def _main(address: str) -> None:
    from rollart.launch.ray import RayLauncher

    try:
        nodes = asyncio.run(_list_nodes(RayLauncher(address)))
    except RollartError as error:
        sys.exit(str(error))
    print(json.dumps([asdict(node) for node in nodes]))


if __name__ == "__main__":
    _main(sys.argv[1])
