"""The controller's client of the gateway: starts its process, opens episodes there, and generates for them.

The invariants:
- A key is made for one episode and revoked when it ends, however it ends; requests under way are cancelled then.
- A pulled request goes to the `generate` of its own episode, and gets one final reply.
- A gateway that dies takes its episodes with it: they fail. It is restarted at most `RESTARTS` times in a row.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rollart.core.endpoint import Endpoint
from rollart.core.errors import EngineFailed, EnvironmentFailed, ServiceError
from rollart.core.events import EventSink, GatewaySample, ServiceEnded
from rollart.core.protocols import Generate, TokenStream
from rollart.core.types import CapturedEpisode, GenerationRequest
from rollart.gateway.limits import EpisodeLimits, GatewayLimits
from rollart.gateway.service import OpenEpisode
from rollart.gateway.upstream import PULL_S, PullReply, PullRequest
from rollart.launch import rpc
from rollart.launch.launcher import Launcher, ResourceRequest, ServiceHandle, service_command, service_started

T = TypeVar("T")
NAME = "policy"  # of the model, for clients
CALL_S = 30.0
START_S = 60.0
RESTARTS, HEALTHY_S = 3, 60.0
_pull_request = msgspec.msgpack.Decoder(PullRequest)


@dataclass(slots=True)
class GatewayEpisode:
    """An episode at the gateway. `captured` is set when the episode has ended, unless the gateway was lost."""

    endpoint: Endpoint
    captured: CapturedEpisode | None = None


class Gateway:
    """`model` is the folder of tokenizer and chat template; `port` is for HTTP clients, 0: any that is free."""

    def __init__(
        self,
        model: Path,
        launcher: Launcher,
        sink: EventSink,
        logs: Path,
        *,
        port: int = 0,
        limits: GatewayLimits | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._launcher, self._sink, self._logs = launcher, sink, logs
        limits = limits or GatewayLimits()
        self._spec = {"model": str(model), "name": NAME, "port": port, "limits": msgspec.to_builtins(limits)}
        self._spec["template_args"] = dict(template_args or {})
        self._stack = AsyncExitStack()
        self._started: ServiceHandle | None = None
        self._client: rpc.RpcClient | None = None
        self._up = asyncio.Event()
        self._pulling: asyncio.Task[None] | None = None
        self._episodes: dict[str, Generate] = {}
        self._alive: set[asyncio.Timeout] = set()  # expire when the gateway is lost, which ends the episodes
        self._running: dict[int, asyncio.Task[None]] = {}
        self._stopped: set[int] = set()  # of these, those whose callers want no more tokens
        self._replies: list[PullReply] = []
        self.url = ""

    async def start(self) -> None:
        """Raises ServiceError."""
        clock = asyncio.get_running_loop().time
        began = clock()
        command = service_command("rollart.gateway.service", self._spec, name="gateway", logs=self._logs)
        self._started = await self._launcher.launch(command, ResourceRequest())
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
        self._sink.emit(service_started("gateway", "gateway", self._started, clock() - began))
        self._up.set()

    async def watch(self) -> None:
        """Restarts the gateway when it ends. Raises ServiceError after too many restarts."""
        restarts = 0
        while True:
            assert self._started is not None
            began = asyncio.get_running_loop().time()
            reason = await self._started.wait()
            self._sink.emit(ServiceEnded(role="gateway", name="gateway", reason=reason))
            await self.close()
            lived = asyncio.get_running_loop().time() - began
            restarts = 0 if lived > HEALTHY_S else restarts + 1
            if restarts > RESTARTS:
                raise ServiceError(f"the gateway ended {restarts} times soon after its start; the last time: {reason}")
            await self.start()

    def sample(self) -> GatewaySample:
        return GatewaySample(sessions=len(self._episodes), requests=len(self._running))

    @property
    def pid(self) -> int | None:
        return None if self._started is None else self._started.pid

    def kill(self) -> None:
        if self._started is not None:
            self._started.kill()

    async def close(self) -> None:
        """`start` may be called again."""
        self._lose()
        tasks = [*self._running.values(), *([self._pulling] if self._pulling else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._replies.clear()
        await self._stack.aclose()

    # Episodes

    @asynccontextmanager
    async def episode(self, limits: EpisodeLimits, generate: Generate) -> AsyncIterator[GatewayEpisode]:
        """Raises EnvironmentFailed if the gateway is lost."""
        client, key = await self._wait_until_up(), secrets.token_urlsafe(32)
        await self._call(client, "open", OpenEpisode(key, limits), type(None))
        self._episodes[limits.id] = generate
        episode = GatewayEpisode(Endpoint(self.url, key, NAME, str(self._spec["model"])))
        alive = asyncio.timeout(None)
        self._alive.add(alive)
        try:
            async with alive:
                yield episode
        except TimeoutError:
            if alive.expired():
                raise EnvironmentFailed("the gateway was lost, and the episode with it") from None
            raise
        finally:
            self._alive.discard(alive)
            del self._episodes[limits.id]
            with suppress(EnvironmentFailed):  # then nothing is captured
                episode.captured = await self._call(client, "close", key, CapturedEpisode)

    async def _wait_until_up(self) -> rpc.RpcClient:
        with suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                await self._up.wait()
        if self._client is None:
            raise EnvironmentFailed(f"the gateway did not come back within {START_S:g} s")
        return self._client

    async def _call(self, client: rpc.RpcClient, method: str, argument: object, returns: type[T]) -> T:
        try:
            return await client.call(method, argument, returns=returns, deadline=CALL_S)
        except ServiceError as error:
            raise EnvironmentFailed(f"the gateway was lost: {error}") from error

    # Requests

    async def _pull(self, client: rpc.RpcClient) -> None:
        """Until the connection is lost or silent; then the process is killed, and `watch` restarts it."""

        def on_item(item: msgspec.Raw) -> None:
            self._on_pulled(client, _pull_request.decode(item))

        with suppress(ServiceError):
            while True:
                await client.call("pull", returns=type(None), deadline=PULL_S + CALL_S, on_item=on_item)
        if self._client is client:
            self._lose()
            self.kill()

    def _lose(self) -> None:
        self._client = None
        self._up.clear()
        now = asyncio.get_running_loop().time()
        for alive in self._alive:
            alive.reschedule(now)

    def _on_pulled(self, client: rpc.RpcClient, pulled: PullRequest) -> None:
        number = pulled.number
        if pulled.request is not None:
            task = asyncio.create_task(self._serve(client, pulled, pulled.request))
            self._running[number] = task
            task.add_done_callback(lambda _: self._on_done(number))
        elif number in self._running:
            if pulled.stop:
                self._stopped.add(number)
            else:
                self._running[number].cancel()

    def _on_done(self, number: int) -> None:
        del self._running[number]
        self._stopped.discard(number)

    async def _serve(self, client: rpc.RpcClient, pulled: PullRequest, request: GenerationRequest) -> None:
        generate, number = self._episodes.get(pulled.episode), pulled.number

        def on_tokens(tokens: list[int]) -> bool:
            self._reply(client, PullReply(number, tokens=tokens))
            return number in self._stopped

        try:
            if generate is None:
                raise EngineFailed("the episode is over")
            stream = TokenStream(pulled.every, on_tokens) if pulled.every else None
            reply = PullReply(number, await generate(request, stream))
        except EngineFailed as error:
            reply = PullReply(number, error=str(error))
        self._reply(client, reply)

    def _reply(self, client: rpc.RpcClient, reply: PullReply) -> None:
        """All replies of one turn of the event loop go in one message."""
        if not self._replies:
            asyncio.get_running_loop().call_soon(self._send, client)
        self._replies.append(reply)

    def _send(self, client: rpc.RpcClient) -> None:
        replies, self._replies = self._replies, []
        client.send("reply", replies)
