"""The Ray launcher: commands on the nodes of a Ray cluster, each run by a small actor.

Invariants:
- The class is chosen here, because Ray would wait silently for one that does not exist; Ray chooses the node. A request
  that no node could ever satisfy is refused at once. If all nodes are busy it is retried for `patience` seconds, each
  time with the preferred class first.
- Commands launched together share one placement group, so all of them are placed or none. It is packed: the ranks of a
  trainer exchange data all the time, and links within a node are faster.
- A launch that fails or is cancelled leaves nothing in the cluster.
- At most `MAX_PLACING` launches are being placed at once, and those that list the nodes at the same time share a list.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

# Ray prints pages about every node that dies; the launcher reports what matters.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "(?s).*")

try:
    import ray
    from ray._private.state import available_resources_per_node
    from ray.exceptions import RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("a run on a Ray cluster needs Ray: pip install 'rollart[ray]'") from error

from rollart.core.errors import ServiceError
from rollart.launch.launcher import Command, Node, ResourceRequest, ServiceHandle, Unsatisfiable, all_or_none
from rollart.launch.ray_actor import CommandActor, RayLocation, RayServiceHandle
from rollart.launch.ray_heartbeat import SILENT_S, NodeHeartbeat, answer
from rollart.launch.ray_nodes import NodeChoice, RayNode, choices, described, ray_nodes

JOIN_S, REACH_S, ASK_S = 30.0, 3.0, 10.0
PLACE_S = 15.0  # for Ray to place what had room a moment ago
ACTOR_S = 60.0  # for a process of Ray to start, on a busy node
RETRY_S = 1.0
ATTEMPTS = 3
MAX_CALLS = 100
MAX_PLACING = 128  # more at once would time out before Ray comes to them

T = TypeVar("T")
Release = Callable[[], Awaitable[None]]
Attempt = Callable[[NodeChoice, list[NodeChoice]], Awaitable[T]]  # the best choice, and others of the same resource


class RayLauncher:
    """Implements `rollart.launch.launcher.Launcher`. `address` is `auto` or `head:6379` on a node of the cluster, or
    `ray://head:10001` from anywhere; it joins the cluster on first use."""

    here = False

    def __init__(self, address: str, *, patience: float = 60.0) -> None:
        self.key = secrets.token_urlsafe(32)
        self._address = address
        self._patience = patience
        self._folder = f"rollart-{uuid.uuid4().hex[:8]}"
        self._joining = asyncio.Lock()
        self._joined = self._ours = False
        self._listing: asyncio.Task[list[RayNode]] | None = None
        self._placing = asyncio.Semaphore(MAX_PLACING)
        self._handles: set[RayServiceHandle] = set()
        self._heartbeats: dict[str, NodeHeartbeat] = {}  # by node

    async def _join(self) -> None:
        if not ray.is_initialized():  # else the program that we are part of did it
            await self._init()
            self._ours = True
        self._actor = ray.remote(max_restarts=0, max_concurrency=MAX_CALLS)(CommandActor)
        self._joined = True

    async def _init(self) -> None:
        if self._address != "auto":
            await _reach(self._address)
        try:
            # In a thread, Ray does not replace our SIGTERM handler.
            async with asyncio.timeout(JOIN_S):
                await asyncio.to_thread(ray.init, self._address, log_to_driver=False, logging_level=logging.ERROR)
        except TimeoutError:
            raise ServiceError(f"the Ray cluster at {self._address} could not be joined within {JOIN_S:g} s") from None
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise ServiceError(f"the Ray cluster at {self._address} cannot be joined: {error}") from error

    async def nodes(self) -> Sequence[Node]:
        """Raises ServiceError."""
        return described(await self._nodes())

    async def own_address(self) -> str:
        await self._nodes()  # joins
        if self._address.startswith("ray://"):
            raise ServiceError(
                f"the nodes of the cluster at {self._address} cannot connect to this machine: start the run on a node "
                "of the cluster (`rollart launch ray`), or name `urls` of a server that they can reach"
            )
        return str(ray.util.get_node_ip_address())

    async def _nodes(self) -> list[RayNode]:
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())
            self._listing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait
        return await asyncio.shield(self._listing)

    async def _list(self) -> list[RayNode]:
        async with self._joining:
            if not self._joined:
                await self._join()
        try:
            async with asyncio.timeout(ASK_S):
                listed = await asyncio.to_thread(ray.nodes)
                if self._address.startswith("ray://"):  # only a process inside the cluster knows its state
                    free = await answer(ray.remote(num_cpus=0)(available_resources_per_node).remote(), ASK_S)
                else:
                    free = await asyncio.to_thread(available_resources_per_node)
        except (TimeoutError, RayError, ConnectionError) as error:
            raise ServiceError(f"the Ray cluster at {self._address} does not list its nodes: {error}") from error
        return ray_nodes(listed, free)

    async def launch(self, command: Command, request: ResourceRequest) -> ServiceHandle:
        async with self._placing:
            actor, location, resource = await self._place_actor(command.name, request)

        async def release() -> None:
            await asyncio.to_thread(ray.kill, actor)

        try:
            return await self._start(command, actor, location, resource, more={}, release=release)
        except BaseException:
            await asyncio.shield(release())
            raise

    async def launch_together(self, commands: Sequence[Command], request: ResourceRequest) -> Sequence[ServiceHandle]:
        name = " and ".join(command.name for command in commands)
        group = await self._place_group(name, request, len(commands))
        running = set(range(len(commands)))

        async def release(rank: int) -> None:
            running.discard(rank)
            if not running:
                await asyncio.to_thread(remove_placement_group, group)  # its actors end with it

        try:
            return await self._start_together(group, commands, release)
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(remove_placement_group, group))
            if isinstance(error, (RayError, TimeoutError)):
                reason = str(error) or f"no answer within {ACTOR_S:g} s"
                raise ServiceError(f"{name} were lost while they started: {reason}") from error
            raise

    async def _start_together(
        self, group: PlacementGroup, commands: Sequence[Command], release: Callable[[int], Awaitable[None]]
    ) -> Sequence[ServiceHandle]:
        actors = [
            self._actor.options(
                **_resources(bundle), scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank)
            ).remote()
            for rank, bundle in enumerate(group.bundle_specs)
        ]
        located = (answer(actor.locate.remote(), ACTOR_S) for actor in actors)
        locations: list[RayLocation] = await asyncio.gather(*located)
        port = await answer(actors[0].free_port.remote(locations[0].address), ASK_S)
        common = {"world": len(commands), "rendezvous": f"{locations[0].address}:{port}"}
        resources = [next(iter(bundle)) for bundle in group.bundle_specs]
        ranks = enumerate(zip(commands, actors, locations, resources, strict=True))
        return await all_or_none(
            self._start(*placed, more=common | {"rank": rank}, release=partial(release, rank)) for rank, placed in ranks
        )

    async def _start(
        self,
        command: Command,
        actor: Any,
        location: RayLocation,
        resource: str,
        *,
        more: Mapping[str, Any],
        release: Release,
    ) -> RayServiceHandle:
        placed_on = (location.node_id, resource)
        node = next((node for node in await self._nodes() if (node.id, node.resource) == placed_on), None)
        if node is None:
            raise ServiceError(f"{command.name} was placed on a node that has died since")
        more = {**more, "bind": location.address, "key": self.key}
        try:
            result = await answer(actor.start.remote(command, more, self._folder), command.start_deadline + SILENT_S)
        except (RayError, TimeoutError) as error:
            raise ServiceError(f"{command.name} was lost while it started on {node.name}: {error}") from error
        if isinstance(result, str):
            raise ServiceError(result)
        pid, first_line = result
        heartbeat = self._heartbeats.setdefault(node.id, NodeHeartbeat(node.address, node.port))
        handle = RayServiceHandle(command.name, actor, node, heartbeat, pid=pid, answer=first_line, release=release)
        self._handles.add(handle)
        handle.ended.add_done_callback(lambda _: self._handles.discard(handle))
        return handle

    async def _place_actor(self, name: str, request: ResourceRequest) -> tuple[Any, RayLocation, str]:
        async def attempt(first: NodeChoice, rest: list[NodeChoice]) -> tuple[Any, RayLocation, str]:
            actor = self._actor.options(
                **_resources({first.resource: request.count}),
                label_selector=dict(first.selector),
                fallback_strategy=[{"label_selector": dict(choice.selector)} for choice in rest] or None,
            ).remote()
            try:
                return actor, await answer(actor.locate.remote(), ACTOR_S), first.resource
            except BaseException:
                await asyncio.shield(asyncio.to_thread(ray.kill, actor))
                raise

        return await self._retry(name, request, 1, attempt)

    async def _place_group(self, name: str, request: ResourceRequest, times: int) -> PlacementGroup:
        async def attempt(first: NodeChoice, rest: list[NodeChoice]) -> PlacementGroup:
            group = placement_group(
                [{first.resource: request.count}] * times,
                strategy="PACK",
                bundle_label_selector=[dict(first.selector)] * times,
            )
            try:
                if not await asyncio.to_thread(group.wait, PLACE_S):
                    raise TimeoutError
            except BaseException:
                await asyncio.shield(asyncio.to_thread(remove_placement_group, group))
                raise
            return group

        return await self._retry(name, request, times, attempt)

    async def _retry(self, name: str, request: ResourceRequest, times: int, attempt: Attempt[T]) -> T:
        """The result of the first attempt that succeeds within the patience. Raises ServiceError."""
        clock = asyncio.get_running_loop().time
        deadline, failures = clock() + self._patience, 0
        while True:
            nodes = await self._nodes()
            able = [choice for choice in choices(request, nodes) if choice.holds(request.count, times)]
            if not able:
                raise Unsatisfiable(name, request, described(nodes))
            free = [choice for choice in able if choice.has_room(request.count, times)]
            if free:
                same = [choice for choice in free[1:] if choice.resource == free[0].resource]
                try:
                    return await attempt(free[0], same)
                except TimeoutError:
                    pass  # another job took the room; try again
                except RayError as error:
                    failures += 1  # its node may have died just now, but hardly three times
                    if failures == ATTEMPTS:
                        hint = "is this version of rollart installed on its nodes?"
                        raise ServiceError(f"Ray could not start {name}; {hint} {error}") from error
            if clock() >= deadline:
                busy = "; ".join(map(str, described(nodes)))
                raise ServiceError(f"{name} needs {request}, but after {self._patience:g} s they are in use: {busy}")
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Stop what is still running, and leave the cluster."""
        await asyncio.gather(*(handle.stop() for handle in list(self._handles)))
        if self._ours:
            await asyncio.to_thread(ray.shutdown)


def _resources(bundle: Mapping[str, float]) -> dict[str, float]:
    return {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}


async def _reach(address: str) -> None:
    """Fail early: Ray itself would try for a minute. Raises ServiceError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host or port, int(port) if host else 6379)
    except (OSError, TimeoutError, ValueError) as error:
        raise ServiceError(
            f"no Ray cluster answers at {address} ({error or 'no answer'}); is `ray start --head` running there?"
        ) from error
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
