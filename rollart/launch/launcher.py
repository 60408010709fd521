"""Launchers start commands on nodes. The controller talks to a started command in the same way, wherever it runs.

A command reads its spec, one JSON line, from standard input and prints one JSON line when it is ready, or
`{"error": why}` if it cannot start; it ends with its standard input. Services and worker hosts are such commands. The
launcher adds to the spec `bind`, the address to listen on, and `key`, the secret that callers must show. `{rollart}` in
the arguments is the folder of this package on the node.
"""

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollart.core.errors import ServiceError
from rollart.core.events import ServiceStarted

NOWHERE = Path(os.devnull)
WITH_PARENT = ("-m", "rollart.launch.with_parent")


@dataclass(frozen=True, slots=True)
class Command:
    """`argv` are the arguments of the interpreter `python` (None: the node's). Standard error goes to `log`, or on a
    node without its folder to a file of that name in a temporary folder. `start_key`: the key of the run file
    for the deadline. `pass_env`: the variables of its node that foreign code gets, besides the harmless ones and
    `environment`; None: all, for services of our own."""

    name: str
    argv: tuple[str, ...]
    spec: Mapping[str, Any]
    log: Path = NOWHERE
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] | None = None
    start_deadline: float = 120.0
    start_key: str = ""


def service_command(module: str, spec: Mapping[str, Any], *, name: str, logs: Path, threads: int = 1) -> Command:
    """The command of one of our services, the program `module`."""
    count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return Command(name, (*WITH_PARENT, module), spec, logs / f"{name}.log", environment=count)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """`count` devices of one of the classes, in order of preference, on any node but those to `avoid`."""

    devices: tuple[str, ...] = ("cpu",)
    count: float = 1
    avoid: frozenset[str] = frozenset()

    def __str__(self) -> str:
        avoid = f", not on {', '.join(sorted(self.avoid))}" if self.avoid else ""
        return f"{self.count:g} x {' or '.join(self.devices)}{avoid}"


@dataclass(frozen=True, slots=True)
class Node:
    """`free` and `total` devices by class; its services listen on `address`."""

    name: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def __str__(self) -> str:
        offers = (f"{self.free.get(device, 0):g} of {total:g} {device} free" for device, total in self.total.items())
        return f"{self.name} ({', '.join(offers) or 'no devices'})"


class ServiceHandle(Protocol):
    """A running command. `answer` is the JSON line that it printed, `device` the class that it got, `address` its
    node's. Once it has ended, `node_lost` is whether its whole node is gone, not just the process."""

    name: str
    pid: int
    node: str
    address: str
    device: str
    answer: Mapping[str, Any]
    node_lost: bool

    async def wait(self) -> str:
        """Wait until it has ended; returns why."""
        ...

    async def stop(self) -> None:
        """End it in order; kill it after a deadline."""
        ...

    def kill(self) -> None: ...


S = TypeVar("S", bound=ServiceHandle)


def service_started(
    role: str, name: str, handle: ServiceHandle, seconds: float, details: Mapping[str, str] | None = None
) -> ServiceStarted:
    return ServiceStarted(
        role=role,
        name=name,
        pid=handle.pid,
        seconds=seconds,
        node=handle.node,
        address=handle.address,
        details=dict(details or {}),
    )


class Launcher(Protocol):
    """`key` is the secret of all that it starts; `here`: on this machine, with shared files and Unix sockets."""

    key: str
    here: bool

    async def nodes(self) -> Sequence[Node]: ...

    async def own_address(self) -> str:
        """Where all that it starts can reach this process. Raises ServiceError."""
        ...

    async def launch(self, command: Command, request: ResourceRequest) -> ServiceHandle:
        """Raises ServiceError, or at once Unsatisfiable if no node could ever satisfy the request."""
        ...

    async def launch_together(self, commands: Sequence[Command], request: ResourceRequest) -> Sequence[ServiceHandle]:
        """All or none, each with the devices of the request, all of one class. Their specs get the `rank`, the `world`
        size and a `rendezvous` (a free `address:port` on the node of rank 0)."""
        ...

    async def close(self) -> None: ...


async def relaunch(launcher: Launcher, command: Command, request: ResourceRequest, old: ServiceHandle) -> ServiceHandle:
    """Start again what ended. A silent node, which a cluster may list for a while yet, is avoided if possible."""
    if old.node_lost:
        with suppress(Unsatisfiable):
            return await launcher.launch(command, replace(request, avoid=request.avoid | {old.node}))
    return await launcher.launch(command, request)


async def all_or_none(starts: Iterable[Coroutine[Any, Any, S]]) -> list[S]:
    """Start all. If one fails the others are stopped: they may be waiting for it."""
    tasks = [asyncio.create_task(start) for start in starts]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(result.stop() for result in results if not isinstance(result, BaseException)))
        raise


class Unsatisfiable(ServiceError):
    """No node could ever satisfy the request."""

    def __init__(self, what: str, request: ResourceRequest, nodes: Sequence[Node]) -> None:
        available = "; ".join(map(str, nodes)) or "no node at all"
        super().__init__(f"{what} needs {request}, which no node has. Available: {available}")
