"""The Ray launcher: commands on the nodes of a Ray cluster, each looked after by a small actor.

The invariants:
- Ray decides which node of a class; which class is tried is decided here, for Ray would wait in silence for one that is
  not there. A request that no node could ever satisfy is refused at once; one that finds all nodes busy waits for
  `patience` seconds, while the preferred class is looked at first each time.
- Commands that belong together are placed by one placement group, so that all of them are or none is. It is packed: the
  ranks of a trainer talk to each other all the time, and links within a node are faster than those between nodes.
- A launch that fails or is cancelled leaves nothing in the cluster.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

# Ray prints pages about every node that dies. What matters about it is told by the launcher.
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
from rollart.launch.ray_caretaker import SILENT_S, Caretaker, RayLocation, RayServiceHandle, answer
from rollart.launch.ray_nodes import NodeChoice, RayNode, choices, described, ray_nodes

JOIN_S, REACH_S, ASK_S = 30.0, 3.0, 10.0
PLACE_S = 15.0  # for Ray to place what there was room for a moment ago
LOOK_AGAIN_S = 1.0
ATTEMPTS = 3
MANY_CALLS = 100

Release = Callable[[], Awaitable[None]]


class RayLauncher:
    """Implements `rollart.launch.launcher.Launcher`. `address` is `auto` or `head:6379` on a node of the cluster, or
    `ray://head:10001` from anywhere; the cluster is joined when it is first needed."""

    here = False

    def __init__(self, address: str, *, patience: float = 60.0) -> None:
        self.key = secrets.token_urlsafe(32)
        self._address = address
        self._patience = patience
        self._folder = f"rollart-{uuid.uuid4().hex[:8]}"
        self._joining = asyncio.Lock()
        self._joined = self._ours = False
        self._started: set[RayServiceHandle] = set()

    async def _join(self) -> None:
        if not ray.is_initialized():  # by the program that we are part of
            await self._init()
            self._ours = True
        self._actor = ray.remote(max_restarts=0, max_concurrency=MANY_CALLS)(Caretaker)
        self._joined = True

    async def _init(self) -> None:
        if self._address != "auto":
            await _reach(self._address)
        try:
            # In a thread it leaves our handler of SIGTERM alone.
            async with asyncio.timeout(JOIN_S):
                await asyncio.to_thread(ray.init, self._address, log_to_driver=False, logging_level=logging.ERROR)
        except TimeoutError:
            raise ServiceError(f"the Ray cluster at {self._address} let nobody join within {JOIN_S:g} s") from None
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise ServiceError(f"the Ray cluster at {self._address} cannot be joined: {error}") from error

    async def nodes(self) -> Sequence[Node]:
        """Raises ServiceError."""
        return described(await self._nodes())

    async def _nodes(self) -> list[RayNode]:
        async with self._joining:
            if not self._joined:
                await self._join()
        try:
            async with asyncio.timeout(ASK_S):
                told = await asyncio.to_thread(ray.nodes)
                if self._address.startswith("ray://"):  # the state of the cluster is only known inside it
                    free = await answer(ray.remote(num_cpus=0)(available_resources_per_node).remote(), ASK_S)
                else:
                    free = await asyncio.to_thread(available_resources_per_node)
        except (TimeoutError, RayError, ConnectionError) as error:
            raise ServiceError(f"the Ray cluster at {self._address} does not tell its nodes: {error}") from error
        return ray_nodes(told, free)

    async def launch(self, command: Command, request: ResourceRequest) -> ServiceHandle:
        actor, where, resource = await self._placed(command.name, request)

        async def release() -> None:
            await asyncio.to_thread(ray.kill, actor)

        try:
            return await self._start(actor, where, resource, command, {}, release)
        except BaseException:
            await asyncio.shield(release())
            raise

    async def launch_together(self, commands: Sequence[Command], request: ResourceRequest) -> Sequence[ServiceHandle]:
        name = " and ".join(command.name for command in commands)
        group = await self._grouped(name, request, len(commands))
        left = set(range(len(commands)))

        async def release(rank: int) -> None:
            left.discard(rank)
            if not left:
                await asyncio.to_thread(remove_placement_group, group)  # its actors end with it

        try:
            return await self._start_together(group, commands, release)
        except BaseException as error:
            await asyncio.shield(asyncio.to_thread(remove_placement_group, group))
            if isinstance(error, (RayError, TimeoutError)):
                raise ServiceError(f"{name} were lost while they started: {error}") from error
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
        places: list[RayLocation] = await asyncio.gather(*(answer(actor.where.remote(), PLACE_S) for actor in actors))
        port = await answer(actors[0].free_port.remote(places[0].address), ASK_S)
        common = {"world": len(commands), "rendezvous": f"{places[0].address}:{port}"}
        return await all_or_none(
            self._start(actor, where, next(iter(bundle)), command, common | {"rank": rank}, partial(release, rank))
            for rank, (actor, where, bundle, command) in enumerate(
                zip(actors, places, group.bundle_specs, commands, strict=True)
            )
        )

    async def _start(
        self, actor: Any, where: RayLocation, resource: str, command: Command, more: Mapping[str, Any], release: Release
    ) -> RayServiceHandle:
        asked = (where.node_id, resource)
        node = next((node for node in await self._nodes() if (node.id, node.resource) == asked), None)
        if node is None:
            raise ServiceError(f"{command.name} was placed on a node that has gone since")
        told = {**more, "bind": where.address, "key": self.key}
        try:
            result = await answer(actor.start.remote(command, told, self._folder), command.start_deadline + SILENT_S)
        except (RayError, TimeoutError) as error:
            raise ServiceError(f"{command.name} was lost while it started on {node.name}: {error}") from error
        if isinstance(result, str):
            raise ServiceError(result)
        pid, said = result
        started = RayServiceHandle(command.name, actor, node, pid=pid, answer=said, release=release)
        self._started.add(started)
        started.ended.add_done_callback(lambda _: self._started.discard(started))
        return started

    # Placing

    async def _placed(self, name: str, request: ResourceRequest) -> tuple[Any, RayLocation, str]:
        async def attempt(first: NodeChoice, rest: list[NodeChoice]) -> tuple[Any, RayLocation, str]:
            actor = self._actor.options(
                **_resources({first.resource: request.count}),
                label_selector=dict(first.selector),
                fallback_strategy=[{"label_selector": dict(choice.selector)} for choice in rest] or None,
            ).remote()
            try:
                return actor, await answer(actor.where.remote(), PLACE_S), first.resource
            except BaseException:
                await asyncio.shield(asyncio.to_thread(ray.kill, actor))
                raise

        placed: tuple[Any, RayLocation, str] = await self._patiently(name, request, 1, attempt)
        return placed

    async def _grouped(self, name: str, request: ResourceRequest, times: int) -> PlacementGroup:
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

        return await self._patiently(name, request, times, attempt)

    async def _patiently(
        self,
        name: str,
        request: ResourceRequest,
        times: int,
        attempt: Callable[[NodeChoice, list[NodeChoice]], Awaitable[Any]],
    ) -> Any:
        """What the first attempt gives that succeeds. Raises ServiceError."""
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
                    pass  # somebody else took the room; look again
                except RayError as error:
                    failures += 1  # its node may have died just now, but not every time
                    if failures == ATTEMPTS:
                        hint = "is this version of rollart installed on its nodes?"
                        raise ServiceError(f"Ray could not start {name}; {hint} {error}") from error
            if clock() >= deadline:
                there = "; ".join(map(str, described(nodes)))
                raise ServiceError(f"{name} needs {request}, but after {self._patience:g} s they are in use: {there}")
            await asyncio.sleep(LOOK_AGAIN_S)

    async def close(self) -> None:
        """End what is still running, and leave the cluster."""
        await asyncio.gather(*(started.stop() for started in list(self._started)))
        if self._ours:
            await asyncio.to_thread(ray.shutdown)


def _resources(bundle: Mapping[str, float]) -> dict[str, float]:
    return {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}


async def _reach(address: str) -> None:
    """Ray would try for a minute. Raises ServiceError."""
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
