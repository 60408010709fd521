"""Environments, leased one by one from worker processes, on one or more hosts per task.

The invariants:
- Tasks share nothing: a task that fails, floods or hangs takes slots and time from itself alone.
- A task has at most `slots` environments on lease, `hedges` second ones that race a slow reset, and `warm` that wait.
- A process serves another episode only if its environment says that it is `reusable`; otherwise it is closed, within
  its deadline and in nobody's way, and ends.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed, ServiceError
from rollart.core.events import EventSink
from rollart.envs.latencies import Latencies
from rollart.envs.lease import Counts, EnvironmentLease, TaskEnvironments
from rollart.envs.remote_host import RemoteHost
from rollart.envs.worker import host_spec
from rollart.launch.launcher import Launcher, ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers.process import Place
from rollart.workers.seat import Tell
from rollart.workers.slot import SlotLost
from rollart.workers.slots import SlotPool
from rollart.workers.warm import Warmth


class EnvironmentPool:
    """Implements `rollart.core.protocols.EnvironmentPool`. What environments print goes to `log`, if given.

    Each task has one host for each of the `requests`, shared by the tasks, and a connection to each of the `urls`,
    where someone else runs a host; its slots are split over them in proportion to the requests, a URL counting as one.
    With neither, it has a single host. `launcher` starts them; without one they run on this machine. `tell` hears of
    each host that started, and again, with the reason, when it died; `sink` of every process that was lost.
    """

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        config: EnvironmentsConfig,
        log: Path | None = None,
        launcher: Launcher | None = None,
        requests: Sequence[ResourceRequest] = (),
        urls: Sequence[str] = (),
        tell: Tell | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self._config = config
        self._sink = sink
        self._launcher = launcher or LocalLauncher()
        self._share = 1 / max(1, len(tasks))
        places = [self._place(request) for request in requests or ([] if urls else [ResourceRequest()])]
        places += [Place(RemoteHost(url), ResourceRequest()) for url in urls]
        # Hosts that someone else runs have their own Python; only those that we start need that of the family.
        self._python = sys.executable if urls and not requests else None
        self._tasks = {task.name: self._environments(task, places, log, tell) for task in tasks}

    def _environments(
        self, task: TaskConfig, places: Sequence[Place], log: Path | None, tell: Tell | None
    ) -> TaskEnvironments:
        config = self._config
        made = {"env": task.env, "args": task.args, "held_out": False}
        pool = SlotPool(
            host_spec(task, log, self._python),
            config.slots,
            farewell="close",
            farewell_s=config.close_deadline,
            places=places,
            tell=tell,
            spares=config.hedges,
            warmth=Warmth(config.warm, "prepare", made, config.reset_deadline),
        )
        return TaskEnvironments(task, config, pool, Latencies(config.hedge_after), self._sink)

    def _place(self, request: ResourceRequest) -> Place:
        return Place(self._launcher, replace(request, count=request.count * self._share))

    @property
    def counts(self) -> Mapping[str, Counts]:
        """What happened so far, by task."""
        return {name: task.counts for name, task in self._tasks.items()}

    @property
    def in_use(self) -> int:
        return sum(task.pool.in_use for task in self._tasks.values())

    @property
    def slots(self) -> int:
        return self._config.slots * len(self._tasks)

    async def start(self) -> None:
        """Raises ServiceError, for example for a module that cannot be imported."""
        await self._each(lambda pool: pool.start())

    async def add(self, request: ResourceRequest) -> None:
        """One more host for each task, while others run. Raises ServiceError."""
        await self._each(lambda pool: pool.add(self._place(request)))

    async def _each(self, do: Callable[[SlotPool], Awaitable[None]]) -> None:
        results = await asyncio.gather(*(do(task.pool) for task in self._tasks.values()), return_exceptions=True)
        for task, result in zip(self._tasks, results, strict=True):
            if isinstance(result, ServiceError):
                raise ServiceError(f"the environment of task {task!r} cannot start: {result}") from result
            if result is not None:
                raise result

    async def watch(self) -> NoReturn:
        """Wait until no task has a host left; if only one has none, its episodes fail at once, which is for quarantine
        to notice. Raises ServiceError."""
        lost = await asyncio.gather(*(task.pool.watch() for task in self._tasks.values()), return_exceptions=True)
        raise ServiceError("; ".join(map(str, lost)))

    async def close(self) -> None:
        await asyncio.gather(*(task.pool.close() for task in self._tasks.values()))

    @asynccontextmanager
    async def lease(self, task: str, held_out: bool) -> AsyncIterator[EnvironmentLease]:
        """Raises EnvironmentFailed when there is no host any more."""
        shared = self._tasks[task]
        async with AsyncExitStack() as stack:
            try:
                lease = await stack.enter_async_context(shared.pool.lease())
            except (SlotLost, ServiceError) as error:
                raise EnvironmentFailed(f"task {task!r} has no environment: {error}") from error
            try:
                yield EnvironmentLease(shared, held_out, lease)
            finally:
                lease.reusable = bool(shared.reusable)
