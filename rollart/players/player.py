"""A player: a process that plays trajectories. It has a renderer, environments, rewards and connections to engines of
its own, and asks the controller where each request goes.

Invariants: every route that it was given is reported as served, failed or dropped, once. Messages arrive in order, and
all that an attempt caused arrives before its result. Versions of sampled tokens are reported when they get older.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import msgspec

from rollart.core.errors import EngineFailed, EngineLost, ServiceError
from rollart.core.events import AnyEvent, TrajectoryEnded
from rollart.core.protocols import EnvironmentPool, Renderer, RewardInvoker
from rollart.core.types import Completion, GenerationRequest
from rollart.engines.client import EngineClient
from rollart.launch import rpc
from rollart.players.messages import (
    Cancellation,
    Confirmed,
    EnvironmentsInUse,
    EpisodeOver,
    EventsEmitted,
    KeyAsked,
    NoEngineYet,
    PlayedAttempt,
    PlayerMessage,
    PlayResult,
    Refused,
    Reply,
    Route,
    RouteAsked,
    RouteDropped,
    RouteFailed,
    RoutePrefilled,
    RouteServed,
    SessionOver,
    VersionSampled,
)
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.requests import Answer, RequestLoop, Routed, RouteNeed, ServedRequest
from rollart.rollout.samples import pack
from rollart.rollout.trajectory import Attempt, TrajectoryRunner

SAMPLE_S = 0.5
_encode = msgspec.msgpack.Encoder().encode


class ControllerLine:
    """Messages to the controller, in lists, and its replies. What is sent before `attach` waits."""

    def __init__(self) -> None:
        self._send: Callable[[list[PlayerMessage]], None] | None = None
        self._pending: list[PlayerMessage] = []
        self._events: list[msgspec.Raw] = []
        self._scheduled = False
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.ended: dict[str, msgspec.Raw] = {}  # the last event of an attempt, for its result

    async def attach(self, stream: rpc.Stream) -> None:
        """For as long as the controller is connected."""
        self._send = stream
        self.flush()
        await asyncio.get_running_loop().create_future()

    def new_number(self) -> int:
        return next(self._numbers)

    def tell(self, message: PlayerMessage) -> None:
        self._pending.append(message)
        self._schedule()

    def emit(self, event: AnyEvent) -> None:
        encoded = msgspec.Raw(_encode(event))
        if isinstance(event, TrajectoryEnded):
            self.ended[event.trajectory] = encoded
        else:
            self._events.append(encoded)
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        self._scheduled = False
        if self._send is None:
            return
        messages, self._pending = self._pending, []
        if self._events:
            messages.append(EventsEmitted(self._events))
            self._events = []
        if messages:
            self._send(messages)

    def expect(self, number: int) -> asyncio.Future[Reply]:
        """The next reply to this number."""
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._waiting.pop(number, None) if future.cancelled() else None)
        return future

    def on_replies(self, replies: list[Reply]) -> None:
        for reply in replies:
            if (future := self._waiting.pop(reply.number, None)) is not None and not future.done():
                future.set_result(reply)


class PlayerRouter(RequestLoop[Route]):
    """Implements `rollout.requests.RequestRouter`: the controller decides, the requests go to the engines from here.
    `deadline` is for one request."""

    def __init__(self, line: ControllerLine, deadline: float) -> None:
        super().__init__()
        self._line, self._deadline = line, deadline
        self._open: dict[int, str] = {}  # routes, with their conversations
        self._pools: dict[str, str] = {}  # that answer conversations now
        self._conversations = count(1)
        self._clients: dict[str, asyncio.Task[EngineClient]] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def pool_of(self, session: str) -> str:
        return self._pools.get(session, "")

    def new_conversation(self) -> int:
        return next(self._conversations)

    def forget(self, session: str) -> None:
        self._line.tell(SessionOver(session))

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        for connecting in list(self._clients.values()):
            connecting.cancel()
        await asyncio.gather(*self._clients.values(), *self._watches, return_exceptions=True)

    async def _admit(self, need: RouteNeed, clock: EpisodeClock | None) -> Route:
        number = self._line.new_number()
        asked = self._line.expect(number)
        self._line.tell(RouteAsked(number, need))
        try:
            reply = await asked
            if isinstance(reply, NoEngineYet):
                later = self._line.expect(number)
                if clock is None:
                    reply = await later
                else:
                    with clock.paused():
                        reply = await later
        except asyncio.CancelledError:
            self._line.tell(RouteDropped(number))
            raise
        if isinstance(reply, Refused):
            raise EngineFailed(reply.reason)
        assert isinstance(reply, Route)
        self._open[number] = need.session
        self._pools[need.session] = reply.pool
        return reply

    async def _attempt(self, route: Route, rest: GenerationRequest, answer: Answer) -> Completion:
        if route.prefill_url:
            rest = await self._prefill(route, rest)
        client = await self._client(route.url)
        return await client.generate_in_parts(rest, answer.every, answer.on_part)

    async def _prefill(self, route: Route, request: GenerationRequest) -> GenerationRequest:
        """An optimisation: if the prefill fails there, the decoding engine does it itself."""
        try:
            await (await self._client(route.prefill_url)).prefill(request)
        except EngineFailed as error:
            self._line.tell(RoutePrefilled(route.number, str(error), isinstance(error, EngineLost)))
            return request
        self._line.tell(RoutePrefilled(route.number))
        return replace(request, kv_from=route.prefill_url)

    async def _client(self, url: str) -> EngineClient:
        """The connection to an engine, which all requests share. Raises EngineFailed."""
        if url not in self._clients:
            self._clients[url] = asyncio.create_task(self._connect(url))
            # Those who wait for it may all have been cancelled.
            self._clients[url].add_done_callback(lambda done: done.cancelled() or done.exception())
        connecting = self._clients[url]
        try:
            return await asyncio.shield(connecting)
        except ServiceError as error:
            if self._clients.get(url) is connecting:
                del self._clients[url]
            late = isinstance(error.__cause__, TimeoutError)  # then it may just be busy
            raise (EngineFailed if late else EngineLost)(str(error)) from error

    async def _connect(self, url: str) -> EngineClient:
        number = self._line.new_number()
        answered = self._line.expect(number)
        self._line.tell(KeyAsked(number, url))
        reply = await answered
        assert isinstance(reply, Confirmed)
        connection = await rpc.connect(url, key=reply.value or None)
        watch = asyncio.create_task(self._watch(url, connection))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return EngineClient(connection, deadline=self._deadline)

    async def _watch(self, url: str, connection: rpc.RpcClient) -> None:
        """Until the connection is lost: the next request connects again."""
        try:
            await connection.lost()
        finally:
            self._clients.pop(url, None)
            await connection.close()

    def record_failure(self, route: Route, reason: str, lost: bool) -> None:
        self._close(route.number)
        self._line.tell(RouteFailed(route.number, reason, lost))

    def record(self, route: Route, served: ServedRequest) -> None:
        self._close(route.number)
        self._line.tell(RouteServed(route.number, served))

    def release(self, route: Route) -> None:
        if self._close(route.number):
            self._line.tell(RouteDropped(route.number))

    def _close(self, number: int) -> bool:
        """Whether it was open."""
        session = self._open.pop(number, None)
        if session is not None:
            self._pools.pop(session, None)
        return session is not None

    def _routed(self, route: Route, completion: Completion) -> Routed:
        return Routed(
            completion=completion,
            engine=route.engine,
            pool=route.pool,
            why=route.why,
            predicted_s=route.predicted_s,
            prefilled_by=route.prefilled_by,
        )


@dataclass(slots=True, kw_only=True)
class Player:
    """The methods of the service."""

    line: ControllerLine
    router: PlayerRouter
    environments: EnvironmentPool
    renderer: Renderer
    rewards: RewardInvoker
    phases: PhaseChanges = field(default_factory=PhaseChanges)
    _attempts: dict[str, Attempt] = field(default_factory=dict)
    _runner: TrajectoryRunner = field(init=False)

    def __post_init__(self) -> None:
        self._runner = TrajectoryRunner(
            environments=self.environments,
            router=self.router,
            renderer=self.renderer,
            rewards=self.rewards,
            sink=self.line,
            phases=self.phases,
        )

    async def attach(self, stream: rpc.Stream) -> None:
        await self.line.attach(stream)

    async def replies(self, replies: list[Reply]) -> None:
        self.line.on_replies(replies)

    async def play(self, played: PlayedAttempt) -> PlayResult:
        attempt = Attempt(
            id=played.id,
            task=played.task,
            group=played.group,
            member=played.member,
            seed=played.seed,
            version=played.version,
            held_out=played.held_out,
            peers=played.peers,
            on_version=_older_only(lambda version: self.line.tell(VersionSampled(played.id, version))),
            on_episode_end=partial(self._episode_over, played.id),
        )
        self._attempts[attempt.id] = attempt
        try:
            trajectory = await self._runner.run(attempt)
        finally:
            del self._attempts[attempt.id]
            ended = self.line.ended.pop(attempt.id, msgspec.Raw())
            self.line.flush()
        return PlayResult(pack(trajectory), ended)

    async def cancel(self, cancellation: Cancellation) -> None:
        attempt = self._attempts.get(cancellation.id)
        if attempt is not None:
            attempt.cancel(cancellation.verdict, cancellation.reason)

    async def _episode_over(self, id: str) -> None:
        number = self.line.new_number()
        allowed = self.line.expect(number)
        self.line.tell(EpisodeOver(number, id))
        await allowed

    async def sample(self, in_use: Callable[[], int]) -> None:
        """Report, for ever, which phases trajectories are in and how many environments are in use."""
        reported = 0
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.phases.sample(self.line, self.router.pool_of)
            if (now := in_use()) != reported:
                reported = now
                self.line.tell(EnvironmentsInUse(now))


def _older_only(report: Callable[[int], None]) -> Callable[[int], None]:
    oldest: int | None = None

    def on_version(version: int) -> None:
        nonlocal oldest
        if oldest is None or version < oldest:
            oldest = version
            report(version)

    return on_version
