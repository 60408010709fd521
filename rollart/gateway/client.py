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
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from rollart.core.endpoint import Endpoint
from rollart.core.errors import EngineFailed, EnvironmentFailed, ServiceError
from rollart.core.events import EventSink, ServiceEnded, ServiceStarted
from rollart.core.protocols import Generate, Listener
from rollart.core.types import Captured, GenerationRequest
from rollart.gateway.limits import Limits
from rollart.gateway.messages import Terms
from rollart.gateway.service import Opening
from rollart.gateway.upstream import PULL_S, Given, Wanted
from rollart.launch import rpc
from rollart.launch.launcher import Launcher, Started, Wish, service_command

T = TypeVar("T")
NAME = "policy"  # of the model, for clients
CALL_S = 30.0
START_S = 60.0
RESTARTS, HEALTHY_S = 3, 60.0
_wanted = msgspec.msgpack.Decoder(Wanted)


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
        self._pulling: asyncio.Task[None] | None = None
        self._episodes: dict[str, Generate] = {}
        self._alive: set[asyncio.Timeout] = set()  # what ends the episodes of a gateway that is lost
        self._running: dict[int, asyncio.Task[None]] = {}
        self._enough: set[int] = set()  # of these, those whose callers want no more tokens
        self._given: list[Given] = []
        self.url = ""

    async def start(self) -> None:
        """Raises ServiceError."""
        clock = asyncio.get_running_loop().time
        began = clock()
        command = service_command("rollart.gateway.service", self._spec, name="gateway", logs=self._logs)
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
        self._pulling = asyncio.create_task(self._pull(client))
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
        tasks = [*self._running.values(), *([self._pulling] if self._pulling else [])]
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

        def hear(item: msgspec.Raw) -> None:
            self._take(client, _wanted.decode(item))

        with suppress(ServiceError):
            while True:
                await client.call("pull", returns=type(None), deadline=PULL_S + CALL_S, hear=hear)
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
        number = wanted.number
        if wanted.request is not None:
            task = asyncio.create_task(self._serve(client, wanted, wanted.request))
            self._running[number] = task
            task.add_done_callback(lambda _: self._ended(number))
        elif number in self._running:
            if wanted.enough:
                self._enough.add(number)
            else:
                self._running[number].cancel()

    def _ended(self, number: int) -> None:
        del self._running[number]
        self._enough.discard(number)

    async def _serve(self, client: rpc.Client, wanted: Wanted, request: GenerationRequest) -> None:
        generate, number = self._episodes.get(wanted.episode), wanted.number

        def hear(tokens: list[int]) -> bool:
            self._give(client, Given(number, tokens=tokens))
            return number in self._enough

        def anew() -> None:
            self._enough.discard(number)
            self._give(client, Given(number, anew=True))

        try:
            if generate is None:
                raise EngineFailed("the episode is over")
            listener = Listener(wanted.every, hear, anew) if wanted.every else None
            given = Given(number, await generate(request, listener))
        except EngineFailed as error:
            given = Given(number, error=str(error))
        self._give(client, given)

    def _give(self, client: rpc.Client, given: Given) -> None:
        """All that is there at the end of this turn of the event loop goes in one message."""
        if not self._given:
            asyncio.get_running_loop().call_soon(self._send, client)
        self._given.append(given)

    def _send(self, client: rpc.Client) -> None:
        given, self._given = self._given, []
        client.send("answer", given)
