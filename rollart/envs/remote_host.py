"""A host of environments that someone else runs (`rollart envs serve`): never started or stopped, known by its URL.

One connection to it stays open as long as it is needed. If it breaks, the host is lost; `launch` connects again.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rollart.core.errors import ServiceError
from rollart.launch.launcher import Command, Node, ResourceRequest, ServiceHandle, Unsatisfiable
from rollart.workers.host import KEY
from rollart.workers.worker_process import CallRaised, ProcessLost, WorkerProcess

CONNECT_S = 30.0


class RemoteConnection:
    """Implements `rollart.launch.launcher.ServiceHandle`: it has ended when its connection is lost."""

    pid = 0
    device = "cpu"
    node_lost = False

    def __init__(self, name: str, url: str, process: WorkerProcess, address: tuple[str, int]) -> None:
        self.name, self.node, self.address = name, url, address[0]
        self.answer: Mapping[str, Any] = {"address": address}
        self._process = process

    async def wait(self) -> str:
        return f"{self.node} cannot be reached any more: {await self._process.ended}"

    async def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        """Closes the connection: the host is not ours to kill."""
        self._process.kill("the connection was closed")


class RemoteHost:
    """Implements `rollart.launch.launcher.Launcher` for the one host at `url`."""

    here = False

    def __init__(self, url: str) -> None:
        self.key = os.environ.get(KEY, "")
        self._url = url
        parts = urlsplit(url)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise ServiceError(f"{url!r} is not the address of a worker host; write tcp://HOST:PORT")
        self._address = (parts.hostname, parts.port)

    async def nodes(self) -> Sequence[Node]:
        return [Node(self._url, self._address[0], {}, {})]

    async def launch(self, command: Command, request: ResourceRequest) -> ServiceHandle:
        """Connect, and check that the host can import the environments. Raises ServiceError."""
        if self._url in request.avoid:
            raise Unsatisfiable(command.name, request, await self.nodes())
        if not self.key:
            raise ServiceError(f"set {KEY} to the key of the host at {self._url}")
        process = WorkerProcess(command.spec["limit"])
        try:
            async with asyncio.timeout(CONNECT_S):
                await process.connect(self._address, self.key)
                for path in command.spec["imports"]:
                    if ".py:" not in path:
                        await process.call("find", {"env": path}, CONNECT_S)
        except BaseException as error:
            process.kill("the connection was closed")
            if isinstance(error, (OSError, ProcessLost, CallRaised)):
                raise ServiceError(self._reason(error)) from error
            raise
        return RemoteConnection(command.name, self._url, process, self._address)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, CallRaised):
            return f"the host at {self._url} cannot import it: {error}"
        if isinstance(error, ProcessLost):
            return f"the host at {self._url} closed the connection; is {KEY} its key? ({error})"
        return f"the host at {self._url} cannot be reached: {error or 'no answer'}"

    async def own_address(self) -> str:
        raise ServiceError(f"nothing says how the host at {self._url} could reach this machine")

    async def launch_together(self, commands: Sequence[Command], request: ResourceRequest) -> Sequence[ServiceHandle]:
        raise ServiceError(f"the host at {self._url} serves environments only")

    async def close(self) -> None:
        """The host is not ours to end."""
