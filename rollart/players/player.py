"""A player: a process that plays trajectories. It has a renderer, environments, rewards and connections to engines of
its own, and asks the controller where each request goes.

Invariants: every route that it was given is reported as served, failed or dropped, once. Messages arrive in order, and
all that an attempt caused arrives before its result. Versions of sampled tokens are reported when they get older.
"""

import asyncio
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import msgspec

from rollart.core.errors import EngineFailed, EngineLost, ServiceError
from rollart.core.events import AnyEvent, TrajectoryEnded
from rollart.core.protocols import EnvironmentPool, Renderer
from rollart.core.types import Completion, GenerationRequest, Outcome
from rollart.engines.client import EngineClient
from rollart.launch import rpc
from rollart.players.messages import (
    AttemptCancelled,
    AttemptToPlay,
    Confirmed,
    ControllerMessage,
    EnvironmentsInUse,
    EpisodeOver,
    EventEmitted,
    KeyAsked,
    NoEngineYet,
    PlayCrashed,
    Played,
    PlayerMessage,
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
from rollart.rewards.invokers import Rewards
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.ledger import TrajectoryCodec
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.requests import Answer, RequestLoop, Routed, RouteNeed, ServedRequest
from rollart.rollout.samples import pack
from rollart.rollout.trajectory import Attempt, TrajectoryRunner

SAMPLE_S, ALIVE_TICKS = 0.5, 4
_messages = msgspec.msgpack.Decoder(list[ControllerMessage])


class ControllerLine:
    """Messages to the controller and its replies. `report` is for what nobody waits for."""

    def __init__(self, tell: Callable[[PlayerMessage], None], report: Callable[[PlayerMessage], None]) -> None:
        self.tell, self.report = tell, report
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self.ended: dict[str, AnyEvent] = {}  # the last event of an attempt, for its result

    def new_number(self) -> int:
        return next(self._numbers)

    def emit(self, event: AnyEvent) -> None:
        if isinstance(event, TrajectoryEnded):
            self.ended[event.trajectory] = event
        else:
            self.report(EventEmitted(event))

    def expect(self, number: int) -> asyncio.Future[Reply]:
        """The next reply to this number."""
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        return future

    def on_reply(self, reply: Reply) -> None:
        future = self._waiting.pop(reply.number, None)
        if future is not None and not future.done():
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
        self._line.report(SessionOver(session))

    async def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        for connecting in list(self._clients.values()):
            connecting.cancel()
        await asyncio.gather(*self._clients.values(), *self._watches, return_exceptions=True)

    def admit(self, need: RouteNeed) -> None:
        """The controller decides, and is asked by `wait_for_engine`."""

    async def wait_for_engine(self, need: RouteNeed, clock: EpisodeClock | None = None) -> Route:
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
            return connecting.result() if connecting.done() else await asyncio.shield(connecting)
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
        self._line.report(RouteServed(route.number, served))

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
    """Plays the attempts that the controller sends. `in_use` counts environments."""

    line: ControllerLine
    router: PlayerRouter
    environments: EnvironmentPool
    renderer: Renderer
    rewards: Rewards
    in_use: Callable[[], int]
    phases: PhaseChanges = field(default_factory=PhaseChanges)
    _attempts: dict[str, Attempt] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _codec: TrajectoryCodec = field(default_factory=TrajectoryCodec)
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

    def receive(self, frame: bytes) -> None:
        """Messages of the controller."""
        for message in _messages.decode(frame):
            if isinstance(message, AttemptToPlay):
                task = asyncio.create_task(self._play(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(message, AttemptCancelled):
                self._cancel(message)
            else:
                self.line.on_reply(message)

    async def _play(self, asked: AttemptToPlay) -> None:
        attempt = Attempt(
            id=asked.id,
            task=asked.task,
            group=asked.group,
            member=asked.member,
            seed=asked.seed,
            version=asked.version,
            held_out=asked.held_out,
            peers=asked.peers,
            on_version=_older_only(lambda version: self.line.tell(VersionSampled(asked.id, version))),
            on_episode_end=partial(self._episode_over, asked.id),
        )
        self._attempts[attempt.id] = attempt
        try:
            trajectory = await self._runner.run(attempt)
            self.line.tell(Played(pack(trajectory, self._codec), self.line.ended.pop(attempt.id)))
        except Exception as error:  # the boundary: a bug ends the run, by the controller
            self.line.tell(PlayCrashed(attempt.id, "".join(traceback.format_exception(error))))
        finally:
            del self._attempts[attempt.id]

    def _cancel(self, cancelled: AttemptCancelled) -> None:
        attempt = self._attempts.get(cancelled.id)
        if attempt is not None:
            attempt.cancel(cancelled.verdict, cancelled.reason)

    async def _episode_over(self, id: str) -> None:
        number = self.line.new_number()
        allowed = self.line.expect(number)
        self.line.tell(EpisodeOver(number, id))
        await allowed

    async def report(self) -> None:
        """For ever: which phases trajectories are in, how many environments are in use, and that it is alive."""
        for tick in count():
            self.phases.sample(self.line, self.router.pool_of)
            if tick % ALIVE_TICKS == 0:
                self.line.tell(EnvironmentsInUse(self.in_use()))
            await asyncio.sleep(SAMPLE_S)

    async def close(self) -> None:
        """End every attempt."""
        for attempt in list(self._attempts.values()):
            attempt.cancel(Outcome.CANCELLED, "the player ended")
        if self._tasks:
            await asyncio.wait(self._tasks)


def _older_only(report: Callable[[int], None]) -> Callable[[int], None]:
    oldest: int | None = None

    def on_version(version: int) -> None:
        nonlocal oldest
        if oldest is None or version < oldest:
            oldest = version
            report(version)

    return on_version
