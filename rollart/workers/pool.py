"""A pool of processes on one or more hosts: claimed one by one, reused while healthy, started and ended as needed.

The invariants:
- At most `limit` claims exist, split over the hosts, granted in the order of the requests. A claim has at most one
  process, no process belongs to two claims, and claimed and idle processes together are at most `limit`. On top of that
  come at most `spares` spare claims, which make no claim wait, the extra claims, and the warm processes.
- A claim returns its process to the pool only if it is healthy and has no call under way, or one that is being
  interrupted, whose end the next claim waits for; so no reply reaches a later claim. However a claim ends, by return,
  error or cancellation, it makes room for the next.
- A host is started by the first that needs it. One that dies loses its processes and is restarted, on another node if
  its own went silent, at most `RESTARTS` times in a row, and `REMOTE_RESTARTS` times elsewhere, where links and nodes
  come back after minutes. Meanwhile its claims move to other hosts as these have room, and after `RESTARTS` attempts
  they have its share, until it is back. When no host is left, every claim and request fails with the reason.
- With `idle_s`, processes unused for that long end, and a host after the last of its own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import chain
from typing import Any, NoReturn

from rollart.core.errors import RollartError, ServiceError
from rollart.launch.launcher import ResourceRequest
from rollart.launch.local import LocalLauncher
from rollart.workers.claim_queue import ClaimQueue
from rollart.workers.host_handle import HostLocation, HostSpec
from rollart.workers.pool_host import HostCallback, PoolHost, Prewarm
from rollart.workers.worker_process import BatchedCall, ProcessLost, WorkerProcess

CLOSE_S = 2.0
RESTARTS, REMOTE_RESTARTS, HEALTHY_S = 5, 30, 60.0
BACKOFF_S, MAX_DOUBLING = 1.0, 30
ACQUIRE_TRIES = 3  # hosts that one `acquire` may find dead

logger = logging.getLogger(__name__)


class ProcessPool:
    """One host at each of the `locations`; by default one on this machine. `close_call` is called in a healthy process
    before it ends, and may take `close_s`; it also interrupts calls of claims that are `interruptible`."""

    def __init__(
        self,
        spec: HostSpec,
        limit: int,
        *,
        idle_s: float | None = None,
        close_call: str = "",
        close_s: float = CLOSE_S,
        locations: Sequence[HostLocation] = (),
        on_host_change: HostCallback | None = None,
        spares: int = 0,
        prewarm: Prewarm | None = None,
    ) -> None:
        self._spec = spec
        self._idle_s = idle_s
        self.close_call, self._close_s = close_call, close_s
        self._on_host_change = on_host_change
        self._prewarm = prewarm or Prewarm()
        self._claims: set[ProcessClaim] = set()
        self._max_spares, self._spares = spares, set[ProcessClaim]()
        self._extra: set[ProcessClaim] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._scaling: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._no_host = asyncio.Event()
        self._restarting: set[asyncio.Task[None]] = set()
        self._queue = ClaimQueue(limit, self._prewarm.count)
        for location in locations or [HostLocation(LocalLauncher(), ResourceRequest())]:
            self._queue.add(self._host(location))

    def _host(self, location: HostLocation) -> PoolHost:
        return PoolHost(self._spec, location, self._on_host_change, self._host_died, self._prewarm)

    @property
    def in_use(self) -> int:
        return len(self._claims)

    @property
    def idle(self) -> int:
        return sum(not process.lost for host in self._queue.hosts for _, process in host.idle)

    @property
    def warm(self) -> int:
        return sum(len(host.warm) for host in self._queue.hosts)

    @property
    def processes(self) -> int:
        """The hosts, and their processes: claimed, idle or warm."""
        claimed = sum(claim.has_process for claim in self._claims | self._spares | self._extra)
        return len(self.host_pids) + self.idle + self.warm + claimed

    @property
    def host_pids(self) -> list[int]:
        """Of those that run, on their nodes."""
        return [host.handle.service.pid for host in self._queue.hosts if host.handle is not None and host.running]

    async def start(self) -> None:
        """Start the hosts now, so that import errors show now. Raises ServiceError."""
        starts = (host.start() for host in self._queue.hosts if host.share)
        results = await asyncio.gather(*starts, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._schedule_scale_down()

    async def add(self, location: HostLocation) -> None:
        """One more host, which takes over its share. Raises ServiceError."""
        host = self._host(location)
        await host.start()
        if self._closing.is_set() or self._no_host.is_set():
            await host.stop()
        else:
            self._queue.add(host)
            host.warm.fill()

    async def watch(self) -> NoReturn:
        """Wait until no host is left. Raises ServiceError with the last one's reason."""
        await self._no_host.wait()
        raise ServiceError(str(self._queue.error))

    @asynccontextmanager
    async def claim(self) -> AsyncIterator["ProcessClaim"]:
        """Raises ProcessLost or ServiceError when no host is left."""
        claim = ProcessClaim(self, await self._queue.acquire())
        self._claims.add(claim)
        try:
            yield claim
        finally:
            self._claims.discard(claim)
            process = claim.release()
            if process is not None and not claim.reusable:
                self._spawn(self._end([process]), self._ending)  # the claim is free at once, however long that takes
            if claim.host is not None:
                if process is not None and claim.reusable:
                    claim.host.release(process)
                    self._schedule_scale_down()
                self._queue.release(claim.host)

    @contextmanager
    def spare_claim(self, first: "ProcessClaim") -> Iterator["ProcessClaim | None"]:
        """A claim on top of the limit, on another host than the `first` if there is one. Its process ends with it,
        unless the first took it over. None while `spares` are out."""
        host = self._queue.spare_host(avoid=first.host)
        if self._closing.is_set() or len(self._spares) >= self._max_spares or host is None:
            yield None
            return
        claim = ProcessClaim(self, host)
        self._spares.add(claim)
        try:
            yield claim
        finally:
            self._spares.discard(claim)
            claim.kill("another was faster")

    def extra_claim(self) -> "ProcessClaim":
        """A claim on top of the limit, until `end_extra` or the end of the pool. Raises ProcessLost or ServiceError."""
        if self._queue.error is not None:
            raise self._queue.error
        if (host := self._queue.spare_host(avoid=None)) is None:
            raise ProcessLost("no host is available")
        claim = ProcessClaim(self, host)
        self._extra.add(claim)
        return claim

    def end_extra(self, claim: "ProcessClaim") -> None:
        self._extra.discard(claim)
        claim.kill()

    async def close(self) -> None:
        """End every process within a deadline. Claims that are still out lose theirs."""
        self._closing.set()
        self._queue.close(ProcessLost("the pool is closed"))
        if self._scaling is not None:
            await self._scaling
        for claim in self._claims | self._spares | self._extra:
            claim.kill("the pool was closed")
        for restarting in self._restarting:
            restarting.cancel()
        await asyncio.gather(*self._restarting, *self._ending, return_exceptions=True)
        hosts = self._queue.hosts
        warm = await asyncio.gather(*(host.warm.drain() for host in hosts))
        await self._end([*chain(*warm), *(process for host in hosts for _, process in host.idle)])
        await asyncio.gather(*(host.stop() for host in hosts))

    # For claims

    async def process(self, claim: "ProcessClaim", fresh: bool) -> WorkerProcess:
        """Raises ProcessLost or ServiceError."""
        for number in range(ACQUIRE_TRIES):
            host = await self._host_of(claim, change=fresh)
            try:
                return await host.process(fresh)
            except ProcessLost:
                if host.available or number + 1 == ACQUIRE_TRIES:
                    raise
        raise AssertionError("unreachable")

    async def _host_of(self, claim: "ProcessClaim", change: bool) -> PoolHost:
        """The host of a claim; another one if it is gone, or for a `change` if there is room."""
        if self._closing.is_set():
            raise ProcessLost("the pool is closed")
        host = claim.host
        if claim in self._spares or claim in self._extra:
            if host is None or not host.available:
                raise ProcessLost("its host is gone")
            return host
        if host is not None and host.available:
            other = self._queue.best_host(exclude=host) if change else None
            if other is None:
                return host
            self._queue.move(host, other)
            claim.host = other
            return other
        if host is not None:
            claim.host = None
            self._queue.release(host)
        claim.host = await self._queue.acquire(first=True)
        return claim.host

    def move(self, claim: "ProcessClaim", spare: "ProcessClaim") -> None:
        """Count the claim on the host of the spare one, which did not count."""
        if spare.host is not None and spare.host is not claim.host:
            spare.host.claims += 1
            if claim.host is not None:
                self._queue.release(claim.host)
            claim.host = spare.host

    # Hosts that die

    def _host_died(self, host: PoolHost, reason: str) -> None:
        if not self._closing.is_set():
            self._spawn(self._restart(host, reason), self._restarting)

    async def _restart(self, host: PoolHost, reason: str) -> None:
        if host.uptime >= HEALTHY_S:
            host.restarts = 0
        limit = RESTARTS if host.location.launcher.here else REMOTE_RESTARTS
        while host.restarts < limit:
            if host.restarts:
                await asyncio.sleep(BACKOFF_S * min(2 ** (host.restarts - 1), MAX_DOUBLING))
            host.restarts += 1
            try:
                await host.restart()
            except ServiceError as error:
                reason = str(error)
                self._queue.set_away(host, host.restarts >= RESTARTS)
            else:
                self._queue.set_away(host, False)
                return
        logger.warning("%s is given up after %d restarts: %s", self._spec.name, host.restarts, reason)
        self._queue.remove(host)
        await host.stop()
        if not self._queue.hosts:
            self._queue.close(ServiceError(f"no {self._spec.name} is left; the last: {reason}"))
            self._no_host.set()

    # Idle processes

    def _schedule_scale_down(self) -> None:
        if self._idle_s is not None and (self._scaling is None or self._scaling.done()) and not self._closing.is_set():
            self._scaling = asyncio.create_task(self._scale_down(self._idle_s))

    async def _scale_down(self, idle_s: float) -> None:
        """End what was idle for `idle_s`, until no host is left."""
        clock = asyncio.get_running_loop().time
        while self.host_pids and not self._closing.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), idle_s / 2)
            for host in self._queue.hosts:
                old = [process for since, process in host.idle if clock() - since >= idle_s]
                host.idle = [(since, process) for since, process in host.idle if clock() - since < idle_s]
                await self._end(old)
                if host.available and not host.claims and not host.idle and not old:
                    await host.stop()

    async def _end(self, processes: list[WorkerProcess]) -> None:
        async def end(process: WorkerProcess) -> None:
            try:
                if await process.settled() and self.close_call:
                    await process.call(self.close_call, {}, self._close_s)
            except RollartError as error:
                logger.warning("a worker did not close: %s", error)
            finally:
                process.kill("it is not needed any more")

        await asyncio.gather(*(end(process) for process in processes))

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


class ProcessClaim:
    """The right to one process of a pool. It has one after `acquire`, until it is lost, killed, or the claim ends."""

    def __init__(self, pool: ProcessPool, host: PoolHost) -> None:
        self._pool = pool
        self._process: WorkerProcess | None = None
        self.host: PoolHost | None = host  # None while it waits for another
        self.reusable = True  # may another claim have the process after this one?
        self.interruptible = False  # may its process survive a call that is cancelled?

    @property
    def has_process(self) -> bool:
        return self._process is not None and not self._process.lost and not self._process.interrupted

    @property
    def used(self) -> bool:
        """Whether its process was ever called."""
        return self._process is not None and self._process.used

    async def acquire(self, fresh: bool = False) -> None:
        """Get an idle process or a new one. If `fresh`, a new one, and on another host if there is room.
        Raises ProcessLost or ServiceError."""
        self.kill()
        self._process = await self._pool.process(self, fresh)

    async def call(self, name: str, args: Mapping[str, object], deadline: float) -> Any:
        """Raises ProcessLost or CallRaised."""
        if self._process is None:
            raise ProcessLost("the claim has no process; acquire one first")
        return await self._process.call(name, args, deadline, self._pool.close_call if self.interruptible else "")

    async def call_all(self, calls: Sequence[BatchedCall], deadline: float) -> list[dict[str, Any]]:
        """Raises ProcessLost or CallRaised."""
        if self._process is None:
            raise ProcessLost("the claim has no process; acquire one first")
        return await self._process.call_all(calls, deadline)

    def kill(self, reason: str = "it was given up") -> None:
        """End its process, if any."""
        if self._process is not None:
            self._process.kill(reason)
            self._process = None

    def take_over(self, spare: "ProcessClaim") -> None:
        """Replace its process by that of a spare claim of the same pool."""
        self.kill("another was faster")
        self._pool.move(self, spare)
        self._process, spare._process = spare._process, None

    def release(self) -> WorkerProcess | None:
        """Its process, if that is healthy; the claim has none any more."""
        process, self._process = self._process, None
        return process if process is not None and not process.lost else None
