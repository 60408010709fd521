"""The actor that runs one command on a node of a Ray cluster, and the controller's handle of it.

Invariants:
- The actor holds the standard input of its child. When the actor dies, with its node or with the controller, that input
  ends, and so does the child.
- The controller waits for the end of the child with one call that the actor answers after `WAIT_S` at the latest.
  That its node is gone is noticed by the node's heartbeat: Ray itself, with its default settings, needs up to 15 s for
  a killed node and a minute for one that hangs.
- Nothing here blocks the event loop, and no Ray call is cancelled: Ray's client does not support it.
"""

import asyncio
import logging
import socket
import tempfile
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from rollart.core.errors import ServiceError
from rollart.launch.child import STOP_DEADLINE, Child
from rollart.launch.launcher import Command
from rollart.launch.local import free_port
from rollart.launch.ray_heartbeat import SILENT_S, NodeHeartbeat, ray_future, replies
from rollart.launch.ray_nodes import RayNode

WAIT_S = 60.0
RELEASE_S = 15.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayLocation:
    node_id: str
    address: str


class CommandActor:
    """Runs on the node."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def locate(self) -> RayLocation:
        context = ray.get_runtime_context()
        return RayLocation(context.get_node_id(), ray.util.get_node_ip_address())

    async def ping(self) -> None:
        """It replies."""

    async def free_port(self, address: str) -> int:
        return free_port(address)

    async def start(
        self, command: Command, more: Mapping[str, Any], folder: str
    ) -> tuple[int, Mapping[str, Any]] | str:
        """The process id and the answer, or why it did not start."""
        log = command.log
        if not log.parent.is_dir():  # this node does not share the controller's folder
            log = Path(tempfile.gettempdir()) / folder / log.name
        try:
            self._child = await Child.start(replace(command, log=log), more)
        except ServiceError as error:
            return f"on {socket.gethostname()}: {error}"
        return self._child.pid, self._child.answer

    async def wait(self, seconds: float) -> str | None:
        """Why it ended; None if it is still running."""
        assert self._child
        try:
            async with asyncio.timeout(seconds):
                return await self._child.wait()
        except TimeoutError:
            return None

    async def stop(self) -> None:
        if self._child is not None:
            await self._child.stop()

    async def kill(self) -> None:
        if self._child is not None:
            self._child.kill()


class RayServiceHandle:
    """Implements `rollart.launch.launcher.ServiceHandle`. `release` frees its resources in the cluster."""

    def __init__(
        self,
        name: str,
        actor: Any,
        node: RayNode,
        heartbeat: NodeHeartbeat,
        *,
        pid: int,
        answer: Mapping[str, Any],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self.name, self.pid, self.answer = name, pid, answer
        self.node, self.address, self.device = node.name, node.address, node.device
        self.node_lost = False
        self._actor, self._heartbeat = actor, heartbeat
        self._release = release
        self.ended = asyncio.create_task(self._watch())

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def stop(self) -> None:
        if not self.ended.done():
            stopping = ray_future(self._actor.stop.remote())
            await asyncio.wait({stopping, self.ended}, timeout=STOP_DEADLINE + SILENT_S, return_when=FIRST_COMPLETED)
            self.kill()  # whatever is left; `_watch` reports the end
        await self.wait()

    def kill(self) -> None:
        if not self.ended.done():
            self._actor.kill.remote()

    async def _watch(self) -> str:
        reason = await self._reason()
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._release()
        except (RayError, TimeoutError) as error:
            logger.warning("the resources of %s in the cluster may still be reserved: %r", self.name, error)
        return reason

    async def _reason(self) -> str:
        lost = self._heartbeat.join(self._actor)
        try:
            while True:
                call = ray_future(self._actor.wait.remote(WAIT_S))
                await asyncio.wait({call, lost}, timeout=WAIT_S + SILENT_S, return_when=FIRST_COMPLETED)
                if not call.done():
                    return self._lost(lost.result() if lost.done() else "it does not reply")
                try:
                    reason: str | None = call.result()
                except ActorUnavailableError:
                    # Usually its process is gone, but it may reply on a new connection.
                    if await self._heartbeat.port_closed() or not await replies(self._actor):
                        return self._lost("the connection to it was closed")
                    continue
                except RayError as error:
                    return self._lost(str(error))
                if reason is not None:
                    return f"{reason} (on {self.node})"
        finally:
            self._heartbeat.leave(self._actor)

    def _lost(self, why: str) -> str:
        self.node_lost = True
        return f"{self.name} was lost with its node {self.node}: {why.strip().splitlines()[-1].strip()}"
