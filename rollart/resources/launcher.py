"""Launchers place processes. The controller speaks to what they started in the same way, wherever it runs.

A command gets one JSON line on its standard input and answers with one on its standard output once it is ready; it
ends when its standard input does. Services and worker hosts are both such commands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Command:
    """`argv` follows the Python interpreter `python` (None: the one of the node). Its standard error goes to `log`."""

    name: str
    argv: tuple[str, ...]
    spec: Mapping[str, Any]
    log: Path
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    start_deadline: float = 120.0


@dataclass(frozen=True, slots=True)
class Wish:
    """Where a command should run: device classes in order of preference, and how many of them it takes. `apart` from
    the nodes named, because they are suspected or already used."""

    devices: tuple[str, ...] = ("cpu",)
    count: float = 1
    apart: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Node:
    """`free` and `total` devices by class; `address` is where its services can be reached."""

    name: str
    address: str
    total: Mapping[str, float]
    free: Mapping[str, float]


class Started(Protocol):
    """A running command. `answer` is the JSON line that it gave; `device` is the class that it got."""

    name: str
    pid: int
    node: str
    device: str
    answer: Mapping[str, Any]

    async def wait(self) -> str:
        """Why it ended, once it has."""
        ...

    async def stop(self) -> None:
        """End it in order, within a deadline."""
        ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    async def nodes(self) -> Sequence[Node]: ...

    async def launch(self, command: Command, wish: Wish) -> Started:
        """Raises ServiceError: at once if no node could ever satisfy the wish, saying what there is."""
        ...

    async def close(self) -> None: ...
