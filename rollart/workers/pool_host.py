"""One host of a pool, and the processes on it: claimed, idle and warm.

The invariants:
- A host is available while claims may be assigned to it: it runs, or will be started by the first that needs it. When
  it dies, which is reported once, it is unavailable until it was restarted.
- Claimed and idle processes are at most `share`, which the pool may change; what exceeds it ends when it is released.
  Warm ones, never used yet, and those of spare claims do not count.
- At most `count` processes are warm, and one more is being prepared; nothing is prepared unless the host runs. A failed
  preparation is repeated only after another process was taken, so a target that always fails costs one try for each.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from rollart.core.errors import RollartError
from rollart.launch.launcher import ServiceHandle
from rollart.workers.host_handle import HostHandle, HostLocation, HostSpec
from rollart.workers.worker_process import ProcessLost, WorkerProcess

HostCallback = Callable[[ServiceHandle, str | None], None]
"""Called when a host has started, and again, with the reason, when it died."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prewarm:
    """How many processes a pool keeps warm, and the call that prepares one; none: it is only started."""

    count: int = 0
    call: str = ""
    args: Mapping[str, object] = field(default_factory=dict)
    deadline: float = 30.0


class PoolHost:
    """Survives the death of its host: `restart` starts another. `on_change` is called on start and death, `on_death`
    on death only."""

    def __init__(
        self,
        spec: HostSpec,
        location: HostLocation,
        on_change: HostCallback | None,
        on_death: Callable[["PoolHost", str], None],
        prewarm: Prewarm | None = None,
    ) -> None:
        self._spec = spec
        self._on_change = on_change or (lambda service, reason: None)
        self._on_death = on_death
        self._lock = asyncio.Lock()
        self._started_at = 0.0
        self._last: ServiceHandle | None = None
        self.handle: HostHandle | None = None
        self.location = location
        self.share = 0
        self.claims = 0
        self.idle: list[tuple[float, WorkerProcess]] = []  # (idle since, process); the last used is at the end
        self.warm = WarmProcesses(prewarm or Prewarm(), self._fork_if_running)
        self.available = True
        self.restarts = 0  # in a row
        self.away = False  # for so long that others have its share

    @property
    def free(self) -> int:
        return self.share - self.claims if self.available else 0

    @property
    def running(self) -> bool:
        return self.handle is not None and self.handle.running

    @property
    def uptime(self) -> float:
        return asyncio.get_running_loop().time() - self._started_at

    async def start(self) -> HostHandle:
        """Starts it unless it runs. Raises ServiceError."""
        async with self._lock:
            return self.handle or await self._start()

    async def restart(self) -> None:
        """Raises ServiceError."""
        async with self._lock:
            await self._stop()
            await self._start()
            self.available = True

    async def stop(self) -> None:
        async with self._lock:
            await self._stop()

    async def _start(self) -> HostHandle:
        handle = HostHandle(self._spec, self.location)
        await handle.start(replaces=self._last)
        self.handle, self._last, self._started_at = handle, handle.service, asyncio.get_running_loop().time()
        handle.ended.add_done_callback(lambda ended: None if ended.cancelled() else self._died(handle, ended.result()))
        self._on_change(handle.service, None)
        self.warm.fill()
        return handle

    async def _stop(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            await handle.stop()

    def _died(self, handle: HostHandle, reason: str) -> None:
        if self.handle is handle and self.available:  # neither stopped by us nor reported already
            self.available = False
            self._on_change(handle.service, reason)
            self._on_death(self, reason)

    async def process(self, fresh: bool) -> WorkerProcess:
        """An idle process, or a new one if `fresh` or none is idle. Raises ProcessLost or ServiceError."""
        if not fresh and (process := await self._reuse()) is not None:
            return process
        self._trim_idle()
        if (warm := self.warm.take()) is not None:
            return warm
        handle = await self.start()
        try:
            return await handle.fork()
        except ProcessLost as error:
            if not handle.running:
                self._died(handle, str(error))
            raise

    async def _reuse(self) -> WorkerProcess | None:
        """An idle process. One that was interrupted is waited for if there is no other."""
        while self.idle:
            newest = reversed(range(len(self.idle)))
            since, process = self.idle.pop(next((at for at in newest if not self.idle[at][1].interrupted), 0))
            try:
                if await process.settled():
                    return process
            except asyncio.CancelledError:
                self.idle.append((since, process))
                raise
        return None

    async def _fork_if_running(self) -> WorkerProcess | None:
        return await self.handle.fork() if self.available and self.handle is not None and self.running else None

    def resize(self, share: int) -> None:
        self.share = share
        self._trim_idle()

    def _trim_idle(self) -> None:
        while self.idle and len(self.idle) + self.claims > self.share:
            self.idle.pop(0)[1].kill("the host's share is used up")

    def release(self, process: WorkerProcess) -> None:
        """By a claim that ends right after."""
        if self.available and self.claims <= self.share:
            self.idle.append((asyncio.get_running_loop().time(), process))
        else:
            process.kill("the host's share shrank")


class WarmProcesses:
    """Fresh processes, prepared before they are needed. `fork` returns None while the host does not run."""

    def __init__(self, prewarm: Prewarm, fork: Callable[[], Awaitable[WorkerProcess | None]]) -> None:
        self._prewarm = prewarm
        self._fork = fork
        self._ready: list[WorkerProcess] = []
        self._filling: asyncio.Task[None] | None = None
        self.count = 0

    def __len__(self) -> int:
        return sum(not process.lost for process in self._ready)

    def take(self) -> WorkerProcess | None:
        taken = None
        while self._ready and taken is None:
            process = self._ready.pop(0)
            taken = None if process.lost else process
        self.fill()
        return taken

    def fill(self) -> None:
        """Start preparing what is missing, in the background."""
        if self.count and (self._filling is None or self._filling.done()):
            self._filling = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        while len(self) < self.count:
            try:
                process = await self._fork()
                if process is None:
                    return
                await self._prepare(process)
            except RollartError as error:
                logger.warning("a worker could not be prepared: %s", error)
                return
            self._ready = [*(ready for ready in self._ready if not ready.lost), process]

    async def _prepare(self, process: WorkerProcess) -> None:
        if self._prewarm.call:
            try:
                await process.call(self._prewarm.call, self._prewarm.args, self._prewarm.deadline)
            except BaseException:
                process.kill("it could not be prepared")
                raise

    async def drain(self) -> list[WorkerProcess]:
        """Prepare no more; the caller ends those that are ready."""
        self.count = 0
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        ready, self._ready = self._ready, []
        return ready
