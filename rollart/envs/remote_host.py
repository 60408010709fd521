"""A host of environments that someone else runs: known by its URL, reached and left, never started or stopped.

`rollart envs serve` is such a host. One connection to it stays open as long as we need it; when that
breaks, the host is lost, and `launch` tries to reach it again.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rollart.core.errors import ServiceError
from rollart.launch.keepalive import enable_keepalive
from rollart.launch.launcher import Command, Node, ResourceRequest, ServiceHandle, Unsatisfiable
from rollart.workers.slot import CallRaised, Slot, SlotLost

KEY = "ROLLART_WORKER_KEY"  # of the environment; what the hosts of others want to be shown
REACH_S = 30.0


class Visit:
    """Implements `rollart.launch.launcher.Started`: it has ended when its connection is lost."""

    pid = 0
    device = "cpu"
    node_lost = False

    def __init__(self, name: str, url: str, slot: Slot, address: tuple[str, int]) -> None:
        self.name, self.node, self.address = name, url, address[0]
        self.answer: Mapping[str, Any] = {"address": address}
        self._slot = slot

    async def wait(self) -> str:
        return f"{self.node} cannot be reached any more: {await self._slot.ended}"

    async def stop(self) -> None:
        self.kill()

    def kill(self) -> None:
        """The host is not ours to kill, only the way to it."""
        self._slot.kill("it was left")


class RemoteHost:
    """Implements `rollart.launch.launcher.Launcher` for the one place that it knows."""

    here = False

    def __init__(self, url: str) -> None:
        self.key = os.environ.get(KEY, "")
        self._url = url
        parts = urlsplit(url)
        if parts.scheme != "tcp" or not parts.hostname or not parts.port:
            raise ServiceError(f"{url!r} is no address of a worker host; write tcp://HOST:PORT")
        self._address = (parts.hostname, parts.port)

    async def nodes(self) -> Sequence[Node]:
        return [Node(self._url, self._address[0], {}, {})]

    async def launch(self, command: Command, request: ResourceRequest) -> ServiceHandle:
        """Reach the host and ask whether it knows what will be wanted. Raises ServiceError."""
        if self._url in request.avoid:
            raise Unsatisfiable(command.name, request, await self.nodes())
        if not self.key:
            raise ServiceError(f"set {KEY} to the key of the host at {self._url}")
        slot = Slot(command.spec["limit"])
        try:
            async with asyncio.timeout(REACH_S):
                transport, _ = await asyncio.get_running_loop().create_connection(lambda: slot, *self._address)
                enable_keepalive(transport.get_extra_info("socket"))
                transport.write(self.key.encode() + b"\n")
                await slot.started
                for path in command.spec["imports"]:
                    if ".py:" not in path:
                        await slot.call("find", {"env": path}, REACH_S)
        except (OSError, SlotLost, CallRaised) as error:
            slot.kill("it was left")
            raise ServiceError(self._why(error)) from error
        except BaseException:
            slot.kill("it was left")
            raise
        return Visit(command.name, self._url, slot, self._address)

    def _why(self, error: Exception) -> str:
        if isinstance(error, CallRaised):
            return f"the host at {self._url} cannot import it: {error}"
        if isinstance(error, SlotLost):
            return f"the host at {self._url} hung up; is {KEY} its key? ({error})"
        return f"the host at {self._url} cannot be reached: {error or 'no answer'}"

    async def launch_together(self, commands: Sequence[Command], request: ResourceRequest) -> Sequence[ServiceHandle]:
        raise ServiceError(f"the host at {self._url} serves environments only")

    async def close(self) -> None:
        """It is not ours to end."""
