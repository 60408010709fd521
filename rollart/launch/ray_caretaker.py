"""The actor that looks after one command on a node of a Ray cluster, and the controller's side of it.

The invariants:
- The actor holds the standard input of its child. When the actor goes, with its node or with the controller, the child
  sees the end of it and ends.
- The controller asks all the time whether the child still runs; an answer is due within `ASK_S`. It gives up once it is
  `SILENT_S` late, or `LATE_S` if the node's port of Ray is closed too, whatever Ray itself believes: with its default
  settings, that takes up to 15 s for a node that was killed and a minute for one that hangs.
- Nothing here blocks the event loop, and no Ray call is cancelled: Ray's client does not expect it.
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

ASK_S, LATE_S, SILENT_S = 2.0, 1.0, 8.0
AGAIN_S = 2.0
CLEAN_UP_S = 15.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayLocation:
    node_id: str
    address: str


class Caretaker:
    """Runs on the node."""

    def __init__(self) -> None:
        self._child: Child | None = None

    async def where(self) -> RayLocation:
        context = ray.get_runtime_context()
        return RayLocation(context.get_node_id(), ray.util.get_node_ip_address())

    async def free_port(self, address: str) -> int:
        return free_port(address)

    async def start(
        self, command: Command, more: Mapping[str, Any], folder: str
    ) -> tuple[int, Mapping[str, Any]] | str:
        """The process id and the answer, or why it did not start."""
        log = command.log
        if not log.parent.is_dir():  # the controller's folder cannot be seen from here
            log = Path(tempfile.gettempdir()) / folder / log.name
        try:
            self._child = await Child.start(replace(command, log=log), more)
        except ServiceError as error:
            return f"on {socket.gethostname()}: {error}"
        return self._child.pid, self._child.answer

    async def wait(self, seconds: float) -> str | None:
        """Why it ended; None if it has not."""
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
    """Of a Ray call. Raises TimeoutError, or what the call raised."""
    future = _future(call)
    done, _ = await asyncio.wait({future}, timeout=deadline)
    if not done:
        raise TimeoutError
    return future.result()


def _future(call: Any) -> asyncio.Future[Any]:
    future: asyncio.Future[Any] = asyncio.wrap_future(call.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits any more
    return future


async def listens(address: str, port: int) -> bool | None:
    """Whether somebody takes connections there; None if that cannot be told in time."""
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
    """Implements `rollart.launch.launcher.Started`. `release` frees what it had in the cluster."""

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
            self.kill()  # whatever is left; the watch tells what became of it
        await self.wait()

    def kill(self) -> None:
        if not self.ended.done():
            self._actor.kill.remote()

    async def _watch(self) -> str:
        reason = await self._reason()
        try:
            async with asyncio.timeout(CLEAN_UP_S):
                await self._release()
        except (RayError, TimeoutError) as error:
            logger.warning("what %s had in the cluster may still be taken: %r", self.name, error)
        return reason

    async def _reason(self) -> str:
        reachable = bool(await listens(self.address, self._port))  # not through every firewall
        while True:
            try:
                reason = await self._ask(reachable)
                if reason is not None:
                    return f"{reason} (on {self.node})"
            except ActorUnavailableError:
                # Most often the process behind it is gone, but it may answer on a new connection.
                if await self._closed(reachable) or not await self._answers():
                    return self._lost("the connection to it was closed")
            except TimeoutError:
                return self._lost("nothing is heard from it")
            except RayError as error:
                return self._lost(str(error))

    async def _ask(self, reachable: bool) -> str | None:
        """Why the child ended; None if it runs. Raises TimeoutError, or what the call raised."""
        clock = asyncio.get_running_loop().time
        asked, call = clock(), _future(self._actor.wait.remote(ASK_S))
        done, _ = await asyncio.wait({call}, timeout=ASK_S + LATE_S)
        while not done:
            if clock() - asked > ASK_S + SILENT_S or await self._closed(reachable):
                raise TimeoutError
            done, _ = await asyncio.wait({call}, timeout=LATE_S)
        reason: str | None = call.result()
        return reason

    async def _closed(self, reachable: bool) -> bool:
        """Whether Ray's port there, which could be reached before, is closed now."""
        return reachable and await listens(self.address, self._port) is False

    async def _answers(self) -> bool:
        try:
            await answer(self._actor.wait.remote(0), AGAIN_S)
        except (RayError, TimeoutError):
            return False
        return True

    def _lost(self, why: str) -> str:
        self.node_lost = True
        return f"{self.name} was lost with its node {self.node}: {why.strip().splitlines()[-1].strip()}"
