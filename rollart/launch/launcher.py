"""Launchers place processes. The controller speaks to what they started in the same way, wherever it runs.

A command gets one JSON line on its standard input and answers with one on its standard output once it is ready, or with
`{"error": why}` if it never will be; it ends when its standard input does. Services and worker hosts are both such
commands. To what the command is told, a launcher adds `bind`, the address to listen on, and `key`, the secret that
callers must show. `{rollart}` in the arguments is the folder of this package on the node.
"""

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollart.core.errors import ServiceError

NOWHERE = Path(os.devnull)


@dataclass(frozen=True, slots=True)
class Command:
    """`argv` follows the Python interpreter `python` (None: the one of the node). Its standard error goes to `log`; on
    a node that has no such folder, to a file of that name in a temporary one."""

    name: str
    argv: tuple[str, ...]
    spec: Mapping[str, Any]
    log: Path = NOWHERE
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    start_deadline: float = 120.0


def service_command(module: str, spec: Mapping[str, Any], *, name: str, logs: Path, threads: int = 1) -> Command:
    """The command that runs a service of ours, `python -m module`."""
    count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return Command(name, ("-m", module), spec, logs / f"{name}.log", environment=count)


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """Where a command should run: device classes in order of preference, and how many of them it takes. `avoid` from
    the nodes named, because they are suspected or already used."""

    devices: tuple[str, ...] = ("cpu",)
    count: float = 1
    avoid: frozenset[str] = frozenset()

    def __str__(self) -> str:
        avoid = f", not on {', '.join(sorted(self.avoid))}" if self.avoid else ""
        return f"{self.count:g} x {' or '.join(self.devices)}{avoid}"


@dataclass(frozen=True, slots=True)
class Node:
    """`free` and `total` devices by class; `address` is where its services can be reached."""

    name: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]

    def __str__(self) -> str:
        offers = (f"{self.free.get(device, 0):g} of {total:g} {device} free" for device, total in self.total.items())
        return f"{self.name} ({', '.join(offers) or 'no devices'})"


class ServiceHandle(Protocol):
    """A running command. `answer` is the JSON line that it gave; `device` is the class that it got, `address` that of
    its node. `node_lost` tells, once it has ended, whether its node went silent rather than the process alone."""

    name: str
    pid: int
    node: str
    address: str
    device: str
    answer: Mapping[str, Any]
    node_lost: bool

    async def wait(self) -> str:
        """Why it ended, once it has."""
        ...

    async def stop(self) -> None:
        """End it in order, within a deadline."""
        ...

    def kill(self) -> None: ...


S = TypeVar("S", bound=ServiceHandle)


class Launcher(Protocol):
    """`key` is the secret of everything that it starts; `here` tells whether that runs on this machine, as its files
    and Unix sockets are ours too."""

    key: str
    here: bool

    async def nodes(self) -> Sequence[Node]: ...

    async def launch(self, command: Command, request: ResourceRequest) -> ServiceHandle:
        """Raises ServiceError: at once if no node could ever satisfy the request, saying what there is."""
        ...

    async def launch_together(self, commands: Sequence[Command], request: ResourceRequest) -> Sequence[ServiceHandle]:
        """All or none, each with as many devices as wished, all of one class. Each is told its `rank`, the size of
        their `world` and a `rendezvous` (`address:port`, free on the node of rank 0)."""
        ...

    async def close(self) -> None: ...


async def relaunch(
    launcher: Launcher, command: Command, request: ResourceRequest, ended: ServiceHandle
) -> ServiceHandle:
    """Start again what ended. A silent node is avoided if any other satisfies the request: a cluster may list it for a
    while yet."""
    if not ended.node_lost:
        return await launcher.launch(command, request)
    try:
        return await launcher.launch(command, replace(request, avoid=request.avoid | {ended.node}))
    except Unsatisfiable:
        return await launcher.launch(command, request)


async def all_or_none(starts: Iterable[Coroutine[Any, Any, S]]) -> list[S]:
    """What all of them started. After a failure the others are given up: they may wait for the one that failed."""
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
    """No node could ever do it."""

    def __init__(self, what: str, request: ResourceRequest, nodes: Sequence[Node]) -> None:
        there = "; ".join(map(str, nodes)) or "no node at all"
        super().__init__(f"{what} needs {request}, which no node has. There is: {there}")
