"""The actor that runs one command on a node of a Ray cluster, and the controller's handle of it.

Invariants:
- The actor holds the standard input of its child. When the actor dies, with its node or with the controller, that input
  ends, and so does the child.
- The controller polls the child; it must reply within `POLL_S`. The node counts as lost once that is `SILENT_S` late,
  or `LATE_S` if Ray's port of the node is closed too. Ray itself, with its default settings, needs up to 15 s for a
  killed node and a minute for one that hangs.
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
from rollart.launch.ray_nodes import RayNode

POLL_S, LATE_S, SILENT_S = 2.0, 1.0, 8.0
RECONNECT_S = 2.0
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


async def answer(call: Any, deadline: float) -> Any:
    """The result of a Ray call. Raises TimeoutError, or what the call raised."""
    future = _future(call)
    done, _ = await asyncio.wait({future}, timeout=deadline)
    if not done:
        raise TimeoutError
    return future.result()


def _future(call: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.wrap_future(call.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, even if unused
    return future


async def is_listening(address: str, port: int) -> bool | None:
    """Whether the port accepts connections; None after a timeout."""
    try:
        async with asyncio.timeout(LATE_S):
            _, writer = await asyncio.open_connection(address, port)
    except TimeoutError:
        return None
    except OSError:
        return False
    writer.close()
    return True


class RayServiceHandle:
    """Implements `rollart.launch.launcher.ServiceHandle`. `release` frees its resources in the cluster."""

    def __init__(
        self,
        name: str,
        actor: Any,
        node: RayNode,
        *,
        pid: int,
        answer: Mapping[str, Any],
        release: Callable[[], Awaitable[None]],
    ) -> None:
        self.name, self.pid, self.answer = name, pid, answer
        self.node, self.address, self.device = node.name, node.address, node.device
        self.node_lost = False
        self._port = node.port
        self._actor = actor
        self._release = release
        self.ended = asyncio.create_task(self._watch())

    async def wait(self) -> str:
        return await asyncio.shield(self.ended)

    async def stop(self) -> None:
        if not self.ended.done():
            stopping = _future(self._actor.stop.remote())
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
        reachable = bool(await is_listening(self.address, self._port))  # a firewall may block it
        while True:
            try:
                reason = await self._poll(reachable)
                if reason is not None:
                    return f"{reason} (on {self.node})"
            except ActorUnavailableError:
                # Usually its process is gone, but it may reply on a new connection.
                if await self._port_closed(reachable) or not await self._replies():
                    return self._lost("the connection to it was closed")
            except TimeoutError:
                return self._lost("it does not reply")
            except RayError as error:
                return self._lost(str(error))

    async def _poll(self, reachable: bool) -> str | None:
        """Why the child ended; None if it runs. Raises TimeoutError, or what the call raised."""
        clock = asyncio.get_running_loop().time
        began, call = clock(), _future(self._actor.wait.remote(POLL_S))
        done, _ = await asyncio.wait({call}, timeout=POLL_S + LATE_S)
        while not done:
            if clock() - began > POLL_S + SILENT_S or await self._port_closed(reachable):
                raise TimeoutError
            done, _ = await asyncio.wait({call}, timeout=LATE_S)
        reason: str | None = call.result()
        return reason

    async def _port_closed(self, reachable: bool) -> bool:
        """Whether Ray's port of the node, which was `reachable` before, is closed now."""
        return reachable and await is_listening(self.address, self._port) is False

    async def _replies(self) -> bool:
        try:
            await answer(self._actor.wait.remote(0), RECONNECT_S)
        except (RayError, TimeoutError):
            return False
        return True

    def _lost(self, why: str) -> str:
        self.node_lost = True
        return f"{self.name} was lost with its node {self.node}: {why.strip().splitlines()[-1].strip()}"
