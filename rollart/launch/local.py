"""The local launcher: commands as child processes of the controller, on the devices of this machine.

CPUs may be overcommitted. A GPU belongs to one command, or to a few that requested fractions of it, until they end.
What is expected to be launched soon can be spawned before its spec is known: its imports take seconds.
"""

import asyncio
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollart.core.errors import ServiceError
from rollart.hardware.gpus import gpus
from rollart.hardware.threads import usable_cores
from rollart.launch.child import Child
from rollart.launch.launcher import Command, Node, ResourceRequest, ServiceHandle, Unsatisfiable, all_or_none

LOOPBACK = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalLauncher:
    """Implements `rollart.launch.launcher.Launcher`. `devices` are the classes of the GPUs, if already known."""

    here = True

    def __init__(self, devices: Sequence[str] | None = None) -> None:
        self.key = secrets.token_urlsafe(32)
        self._name = socket.gethostname()
        self._devices = gpus() if devices is None else tuple(devices)
        self._free = [1.0] * len(self._devices)  # of each GPU
        self._children: set[Child] = set()
        self._spares: dict[str, tuple[Command, Child]] = {}

    async def nodes(self) -> Sequence[Node]:
        return [self._node()]

    async def own_address(self) -> str:
        return LOOPBACK

    def _node(self) -> Node:
        cores = float(usable_cores())
        free = dict.fromkeys(self._devices, 0.0)
        for device, part in zip(self._devices, self._free, strict=True):
            free[device] += part
        total = {device: float(count) for device, count in Counter(self._devices).items()}
        return Node(self._name, LOOPBACK, {"cpu": cores} | total, {"cpu": cores} | free)

    async def launch_together(self, commands: Sequence[Command], request: ResourceRequest) -> Sequence[ServiceHandle]:
        rendezvous = f"{LOOPBACK}:{free_port(LOOPBACK)}"
        return await all_or_none(
            self.launch(command, request, rank=rank, world=len(commands), rendezvous=rendezvous)
            for rank, command in enumerate(commands)
        )

    async def launch(self, command: Command, request: ResourceRequest, **more: Any) -> Child:
        device, taken = self._reserve(command.name, request)
        visible = {VISIBLE: ",".join(map(str, taken))} if taken else {}
        placed = replace(command, environment={**visible, **command.environment})
        try:
            child = await Child.start(placed, {**more, "bind": LOOPBACK, "key": self.key}, await self._spare(placed))
        except BaseException:
            self._release(taken)
            raise
        child.node, child.address, child.device = self._name, LOOPBACK, device
        self._children.add(child)
        child.ended.add_done_callback(lambda _: self._children.discard(child))
        child.ended.add_done_callback(lambda _: self._release(taken))
        return child

    async def expect(self, command: Command) -> None:
        """Spawn the process of a command that will be launched soon, with a spec that is not known yet."""
        if command.name not in self._spares:
            self._spares[command.name] = command, await Child.spawn(command)

    async def _spare(self, command: Command) -> Child | None:
        """The process that was spawned for this command, unless the two differ in more than the spec."""
        expected, spare = self._spares.pop(command.name, (None, None))
        if expected is None or spare is None or _without_spec(expected) == _without_spec(command):
            return spare
        await spare.stop()
        return None

    def _reserve(self, name: str, request: ResourceRequest) -> tuple[str, dict[int, float]]:
        """The class, and the fraction taken of each GPU. Raises ServiceError."""
        node = self._node()
        for device in request.devices if self._name not in request.avoid else ():
            if device == "cpu":
                return device, {}
            parts = [1.0] * int(request.count) or [request.count]
            room = [i for i, other in enumerate(self._devices) if other == device and self._free[i] >= max(parts)]
            if len(room) >= len(parts):
                taken = dict(zip(room, parts, strict=False))
                for gpu, part in taken.items():
                    self._free[gpu] -= part
                return device, taken
        possible = any(node.total.get(device, 0) >= request.count for device in request.devices)
        if self._name in request.avoid or not possible:
            raise Unsatisfiable(name, request, [node])
        raise ServiceError(f"{name} needs {request}, but they are in use: {node}")

    def _release(self, taken: Mapping[int, float]) -> None:
        for gpu, part in taken.items():
            self._free[gpu] += part

    async def close(self) -> None:
        """Stop what is still running."""
        spares = [spare for _, spare in self._spares.values()]
        self._spares.clear()
        await asyncio.gather(*(child.stop() for child in [*self._children, *spares]))


def _without_spec(command: Command) -> Command:
    return replace(command, spec={}, start_deadline=0.0, start_key="")


def free_port(address: str) -> int:
    """A TCP port that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
