"""The gateway of a run, from the controller's side: its process, the episodes that are open at it, and their requests.

The invariants:
- A key is made for one episode and revoked when it ends, however it ends; requests that are under way then are
  cancelled.
- A request that the gateway hands over goes to the `generate` of its own episode, and is answered once.
- A gateway that dies takes its episodes with it: they fail, and others begin at the one started in its place, which
  happens at most `RESTARTS` times in a row.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from rollart.agents.endpoint import Endpoint
from rollart.errors import EngineFailed, EnvironmentFailed, ServiceError
from rollart.gateway.app import Limits
from rollart.gateway.service import Opening
from rollart.gateway.upstream import PULL_S, Given, Wanted
from rollart.gateway.words import Captured, Terms
from rollart.observe.events import EventSink, ServiceEnded, ServiceStarted
from rollart.resources.launcher import Launcher, Started, Wish, service
from rollart.services import rpc
from rollart.types import Completion, GenerationRequest

T = TypeVar("T")
Generate = Callable[[GenerationRequest], Awaitable[Completion]]
NAME = "policy"  # of the model, for clients
PULLS = 2  # one is on its way while the other is being worked on
CALL_S = 30.0
START_S = 60.0
RESTARTS, HEALTHY_S = 3, 60.0


@dataclass(slots=True)
class Opened:
    """An episode at the gateway. `captured` is there once the episode has ended, unless the gateway was lost."""

    endpoint: Endpoint
    captured: Captured | None = None


class Gateway:
    """`model` is the folder whose tokenizer and chat template are used; `port` is for clients, 0: any that is free."""

    def __init__(
        self,
        model: Path,
        launcher: Launcher,
        sink: EventSink,
        logs: Path,
        *,
        port: int = 0,
        limits: Limits | None = None,
    ) -> None:
        self._launcher, self._sink, self._logs = launcher, sink, logs
        limits = limits or Limits()
        self._spec = {
            "model": str(model),
            "name": NAME,
            "port": port,
            "limits": msgspec.to_builtins(limits),
        }
        self._stack = AsyncExitStack()
        self._started: Started | None = None
        self._client: rpc.Client | None = None
        self._up = asyncio.Event()
        self._pulling: list[asyncio.Task[None]] = []
        self._episodes: dict[str, Generate] = {}
        self._alive: set[asyncio.Timeout] = set()  # what ends the episodes of a gateway that is lost
        self._running: dict[int, asyncio.Task[None]] = {}
        self._given: list[Given] = []
        self._answering: asyncio.Task[None] | None = None
        self.url = ""

    async def start(self) -> None:
        """Raises ServiceError."""
        clock = asyncio.get_running_loop().time
        began = clock()
        command = service("rollart.gateway.service", self._spec, name="gateway", logs=self._logs)
        self._started = await self._launcher.launch(command, Wish())
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(self._started.stop)
        try:
            address = str(self._started.answer["url"])
            client = await self._stack.enter_async_context(rpc.connected(address, key=self._launcher.key))
            self.url = await client.call("address", returns=str, deadline=CALL_S)
        except BaseException:
            await self._stack.aclose()
            raise
        self._client = client
        self._pulling = [asyncio.create_task(self._pull(client)) for _ in range(PULLS)]
        self._sink.emit(ServiceStarted(role="gateway", name="gateway", pid=self._started.pid, seconds=clock() - began))
        self._up.set()

    async def watch(self) -> None:
        """Returns never; raises ServiceError when the gateway cannot be kept up."""
        restarts = 0
        while True:
            assert self._started is not None
            began = asyncio.get_running_loop().time()
            reason = await self._started.wait()
            self._sink.emit(ServiceEnded(role="gateway", name="gateway", reason=reason))
            await self._down()
            lived = asyncio.get_running_loop().time() - began
            restarts = 0 if lived > HEALTHY_S else restarts + 1
            if restarts > RESTARTS:
                raise ServiceError(f"the gateway ended {restarts} times soon after its start, the last: {reason}")
            await self.start()

    @property
    def pid(self) -> int | None:
        return None if self._started is None else self._started.pid

    def kill(self) -> None:
        if self._started is not None:
            self._started.kill()

    async def close(self) -> None:
        await self._down()

    async def _down(self) -> None:
        self._lose()
        tasks = [*self._pulling, *self._running.values(), *([self._answering] if self._answering else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._given.clear()
        await self._stack.aclose()

    # Episodes

    @asynccontextmanager
    async def episode(self, terms: Terms, generate: Generate) -> AsyncIterator[Opened]:
        """Raises EnvironmentFailed if the gateway is lost."""
        client, key = await self._reached(), secrets.token_urlsafe(32)
        await self._call(client, "open", Opening(key, terms), type(None))
        self._episodes[terms.id] = generate
        opened = Opened(Endpoint(self.url, key, NAME, str(self._spec["model"])))
        alive = asyncio.timeout(None)
        self._alive.add(alive)
        try:
            async with alive:
                yield opened
        except TimeoutError:
            if alive.expired():
                raise EnvironmentFailed("the gateway was lost, and the episode with it") from None
            raise
        finally:
            self._alive.discard(alive)
            del self._episodes[terms.id]
            with suppress(EnvironmentFailed):  # then nothing is captured, and whoever asks is told
                opened.captured = await self._call(client, "close", key, Captured)

    async def _reached(self) -> rpc.Client:
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._up.wait()
        if self._client is None:
            raise EnvironmentFailed(f"the gateway did not come back within {START_S:g} s")
        return self._client

    async def _call(self, client: rpc.Client, method: str, argument: object, returns: type[T]) -> T:
        try:
            return await client.call(method, argument, returns=returns, deadline=CALL_S)
        except ServiceError as error:
            raise EnvironmentFailed(f"the gateway was lost: {error}") from error

    # Requests

    async def _pull(self, client: rpc.Client) -> None:
        """Until the connection is lost or silent; the process is then ended, which `watch` hears of."""
        with suppress(ServiceError):
            while True:
                pulled = await client.call("pull", returns=list[Wanted], deadline=PULL_S + CALL_S)
                for wanted in pulled:
                    self._take(client, wanted)
        if self._client is client:
            self._lose()
            self.kill()

    def _lose(self) -> None:
        self._client = None
        self._up.clear()
        now = asyncio.get_running_loop().time()
        for alive in self._alive:
            alive.reschedule(now)

    def _take(self, client: rpc.Client, wanted: Wanted) -> None:
        if wanted.request is None:
            if wanted.number in self._running:
                self._running[wanted.number].cancel()
            return
        task = asyncio.create_task(self._serve(client, wanted, wanted.request))
        self._running[wanted.number] = task
        task.add_done_callback(lambda _: self._running.pop(wanted.number, None))

    async def _serve(self, client: rpc.Client, wanted: Wanted, request: GenerationRequest) -> None:
        generate = self._episodes.get(wanted.episode)
        try:
            if generate is None:
                raise EngineFailed("the episode is over")
            given = Given(wanted.number, await generate(request))
        except EngineFailed as error:
            given = Given(wanted.number, error=str(error))
        self._given.append(given)
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer(client))

    async def _answer(self, client: rpc.Client) -> None:
        """All that is there in one call; what comes meanwhile in the next."""
        with suppress(ServiceError):
            while self._given:
                given, self._given = self._given, []
                await client.call("answer", given, returns=type(None), deadline=CALL_S)
