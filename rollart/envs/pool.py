"""Environments, claimed one by one from worker processes, on one or more hosts per task.

The invariants:
- Tasks share nothing: a task that fails, floods or hangs takes processes and time from itself alone.
- A task has at most `processes` claimed environments, `hedges` second ones that race a slow reset, and `warm` ones.
- A process serves another episode only if its environment declares that it is `reusable`; otherwise it is closed in the
  background, within its deadline, and ends. It serves several at once only if that declares `isolation = "shared"`.
"""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from rollart.config import EnvironmentsConfig, TaskConfig
from rollart.core.errors import EnvironmentFailed, ServiceError
from rollart.core.events import EventSink
from rollart.envs import families
from rollart.envs.claim import EnvironmentClaim, EnvironmentCounts, TaskEnvironments
from rollart.envs.latencies import Latencies
from rollart.envs.remote_host import RemoteHost
from rollart.envs.shared import SHARED, SharedEnvironment, SharedProcesses, declared_isolation
from rollart.launch.launcher import Launcher, ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers.host import ENVIRONMENT
from rollart.workers.host_handle import HostLocation, HostSpec
from rollart.workers.pool import ProcessPool
from rollart.workers.pool_host import HostCallback, Prewarm
from rollart.workers.worker_process import ProcessLost

IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def host_spec(
    task: TaskConfig, config: EnvironmentsConfig, log: Path | None = None, python: str | None = None
) -> HostSpec:
    """`python` overrides that of the task's family. What the task's args name, such as the environment that a wrapper
    plays, is imported once, too. Raises ConfigError if the family is not installed."""
    if python is None and task.family:
        python = families.python_of(task.family)
    return HostSpec(
        ENVIRONMENT,
        (ENVIRONMENT, task.env),
        preload=tuple(arg for arg in task.env_args.values() if isinstance(arg, str) and IMPORT_PATH.fullmatch(arg)),
        python=python,
        log=log,
        name=f"host of {task.name} environments",
        pass_env=tuple(task.pass_env),
        limits=config.limits,
    )


class EnvironmentPool:
    """Implements `rollart.core.protocols.EnvironmentPool`. What environments print goes to `log`, if given.

    Each task has one host for each of the `requests`, shared by the tasks, and a connection to each of the `urls`,
    where someone else runs a host; its processes are split over them in proportion to the requested counts, a URL
    counting as one. With neither, it has one host. Without a `launcher` they run here. Lost processes go to `sink`."""

    def __init__(
        self,
        tasks: Sequence[TaskConfig],
        config: EnvironmentsConfig,
        *,
        log: Path | None = None,
        launcher: Launcher | None = None,
        requests: Sequence[ResourceRequest] = (),
        urls: Sequence[str] = (),
        on_host_change: HostCallback | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self._config = config
        self._sink = sink
        self._launcher = launcher or LocalLauncher()
        self._share = 1 / max(1, len(tasks))
        locations = [self._location(request) for request in requests or ([] if urls else [ResourceRequest()])]
        locations += [HostLocation(RemoteHost(url), ResourceRequest()) for url in urls]
        # Hosts that someone else runs have their own Python; only those that we start need that of the family.
        self._python = sys.executable if urls and not requests else None
        self._tasks = {task.name: self._environments(task, locations, log, on_host_change) for task in tasks}
        self._shared = {name: SharedProcesses(task, config.processes) for name, task in self._tasks.items()}
        self._sharing = {task.name: task.isolation == SHARED for task in tasks if task.isolation != "auto"}
        self._asking = asyncio.Lock()

    def _environments(
        self, task: TaskConfig, locations: Sequence[HostLocation], log: Path | None, on_host_change: HostCallback | None
    ) -> TaskEnvironments:
        config = self._config
        prepared = {"env": task.env, "args": task.env_args, "held_out": False}
        pool = ProcessPool(
            host_spec(task, config, log, self._python),
            config.processes,
            close_call="close",
            close_s=config.close_deadline,
            locations=locations,
            on_host_change=on_host_change,
            spares=config.hedges,
            prewarm=Prewarm(config.warm, "prepare", prepared, config.reset_deadline),
        )
        return TaskEnvironments(task, config, pool, Latencies(config.hedge_after), self._sink)

    def _location(self, request: ResourceRequest) -> HostLocation:
        return HostLocation(self._launcher, replace(request, count=request.count * self._share))

    @property
    def counts(self) -> Mapping[str, EnvironmentCounts]:
        """What happened so far, by task."""
        return {name: task.counts for name, task in self._tasks.items()}

    @property
    def in_use(self) -> int:
        own = sum(task.pool.in_use for task in self._tasks.values())
        return own + sum(shared.in_use for shared in self._shared.values())

    @property
    def capacity(self) -> int:
        return self._config.processes * len(self._tasks)

    async def start(self) -> None:
        """Raises ServiceError, for example for a module that cannot be imported."""
        await self._each(lambda pool: pool.start())

    async def add(self, request: ResourceRequest) -> None:
        """One more host for each task, while others run. Raises ServiceError."""
        await self._each(lambda pool: pool.add(self._location(request)))

    async def _each(self, do: Callable[[ProcessPool], Awaitable[None]]) -> None:
        results = await asyncio.gather(*(do(task.pool) for task in self._tasks.values()), return_exceptions=True)
        for task, result in zip(self._tasks, results, strict=True):
            if isinstance(result, ServiceError):
                raise ServiceError(f"the environment of task {task!r} cannot start: {result}") from result
            if result is not None:
                raise result

    async def watch(self) -> NoReturn:
        """Wait until no task has a host left (if one has none, quarantine notices). Raises ServiceError."""
        lost = await asyncio.gather(*(task.pool.watch() for task in self._tasks.values()), return_exceptions=True)
        raise ServiceError("; ".join(map(str, lost)))

    async def close(self) -> None:
        await asyncio.gather(*(task.pool.close() for task in self._tasks.values()))

    async def _shares(self, task: TaskEnvironments) -> bool:
        """As the task says, or as the environment declares, which its first process is asked for."""
        name = task.task.name
        if name not in self._sharing:
            async with self._asking:
                if name not in self._sharing:
                    self._sharing[name] = await declared_isolation(task) == SHARED
        return self._sharing[name]

    @asynccontextmanager
    async def claim(self, task: str, held_out: bool) -> AsyncIterator[EnvironmentClaim | SharedEnvironment]:
        """Raises EnvironmentFailed when no host is left."""
        shared, many = self._tasks[task], self._shared[task]
        async with AsyncExitStack() as stack:
            if not many.given_up and await self._shares(shared):
                slot = await many.take()
                try:
                    yield SharedEnvironment(many, held_out, slot, stack)
                finally:
                    many.release(slot)
                return
            try:
                claim = await stack.enter_async_context(shared.pool.claim())
            except (ProcessLost, ServiceError) as error:
                raise EnvironmentFailed(f"task {task!r} has no environment: {error}") from error
            try:
                yield EnvironmentClaim(shared, held_out, claim)
            finally:
                claim.reusable = bool(shared.reusable)
