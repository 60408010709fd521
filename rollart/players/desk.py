"""The controller's side of one player: answers its questions with the decisions of the router.

Invariants: everything that the player's messages change, they change at once and in their order. What was reserved for
requests of a player that ended is released.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from rollart.core.errors import EngineFailed
from rollart.core.events import EventSink, TrajectoryStarted
from rollart.players.messages import (
    Confirmed,
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
from rollart.rollout.router import Router, RouteTicket
from rollart.rollout.trajectory import Attempt

_messages = msgspec.msgpack.Decoder(list[PlayerMessage])


class RoutingDesk:
    """`send` takes replies to the player; `attempts` are those that it plays, with the futures of their results, and
    `started` the ones whose first event was logged. `on_bug` gets exceptions of our own code."""

    def __init__(
        self,
        router: Router,
        sink: EventSink,
        attempts: dict[str, tuple[Attempt, "asyncio.Future[Played]"]],
        *,
        send: Callable[[Reply], None],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self._router, self._sink, self._attempts, self._reply, self._on_bug = router, sink, attempts, send, on_bug
        self._tickets: dict[int, RouteTicket] = {}
        self._keys: dict[str, str] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = False
        self.in_use = 0
        self.started: set[str] = set()
        self._handlers: dict[type[PlayerMessage], Callable[..., None]] = {
            RouteAsked: self._route,
            KeyAsked: lambda asked: self._reply(Confirmed(asked.number, self._keys.get(asked.url, ""))),
            RouteServed: self._served,
            RouteFailed: self._failed,
            RouteDropped: lambda dropped: self._drop(dropped.number),
            RoutePrefilled: self._prefilled,
            SessionOver: lambda over: self._router.forget(over.session),
            VersionSampled: self._version,
            EpisodeOver: self._episode_over,
            EventEmitted: self._emit,
            EnvironmentsInUse: self._environments,
            Played: self._played,
            PlayCrashed: self._crashed,
        }

    def receive(self, frame: bytes) -> None:
        """Messages of the player."""
        if self._closed:
            return
        try:
            for message in _messages.decode(frame):
                self._handlers[type(message)](message)
        except Exception as error:  # a bug of ours must end the run, not the connection
            self._on_bug(error)

    def close(self) -> None:
        """The player has ended."""
        self._closed = True
        for task in self._tasks.values():
            task.cancel()
        for number in list(self._tickets):
            self._drop(number)
        for id in self._attempts:
            self._router.forget(id)

    # Routes

    def _route(self, asked: RouteAsked) -> None:
        ticket = self._router.admit(asked.need)
        if ticket is not None:
            self._give(asked.number, ticket)
            return
        self._reply(NoEngineYet(asked.number))
        self._spawn(asked.number, self._wait(asked))

    async def _wait(self, asked: RouteAsked) -> None:
        try:
            ticket = await self._router.wait_for_engine(asked.need)
        except EngineFailed as error:
            self._reply(Refused(asked.number, str(error)))
        else:
            self._give(asked.number, ticket)

    def _give(self, number: int, ticket: RouteTicket) -> None:
        self._tickets[number] = ticket
        choice = ticket.choice
        engine, prefill = choice.engine, choice.prefill_at
        if prefill is not None:
            self._router.begin_prefill(ticket)
        self._reply(
            Route(
                number=number,
                engine=engine.name,
                url=self._address(engine.client),
                pool=engine.pool.name,
                why=choice.why,
                predicted_s=choice.prediction.seconds,
                prefilled_by=prefill.name if prefill is not None else "",
                prefill_url=self._address(prefill.client) if prefill is not None else "",
            )
        )

    def _address(self, client: object) -> str:
        url = str(getattr(client, "url"))  # noqa: B009 (an engine of a run always has one; the protocol does not)
        if url not in self._keys:
            self._keys[url] = getattr(client, "key", None) or ""
        return url

    def _served(self, message: RouteServed) -> None:
        ticket = self._tickets.pop(message.number)
        self._router.record(ticket, message.served)
        self._router.release(ticket)

    def _failed(self, message: RouteFailed) -> None:
        ticket = self._tickets.pop(message.number)
        self._router.record_failure(ticket, message.reason, message.lost)
        self._router.release(ticket)

    def _prefilled(self, message: RoutePrefilled) -> None:
        ticket = self._tickets[message.number]
        self._router.end_prefill(ticket)
        prefill = ticket.choice.prefill_at
        if not message.reason:
            self._router.record_prefill(ticket)
        elif message.lost and prefill is not None:
            self._router.engines.lose(prefill, message.reason)

    def _drop(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()
        if (ticket := self._tickets.pop(number, None)) is not None:
            self._router.release(ticket)

    # Attempts

    def _version(self, message: VersionSampled) -> None:
        if (known := self._attempts.get(message.id)) is not None:
            known[0].on_version(message.version)

    def _episode_over(self, message: EpisodeOver) -> None:
        attempt, _ = self._attempts.get(message.id, (None, None))
        if attempt is None or attempt.on_episode_end is None:
            self._reply(Confirmed(message.number))
            return
        attempt.episode_over = True
        self._spawn(message.number, self._allow_reward(message.number, attempt.on_episode_end))

    def _played(self, message: Played) -> None:
        _, result = self._attempts.get(message.trajectory.id, (None, None))
        if result is not None and not result.done():
            result.set_result(message)

    def _crashed(self, message: PlayCrashed) -> None:
        self._on_bug(RuntimeError(f"{message.id} could not be played:\n{message.error}"))

    async def _allow_reward(self, number: int, on_episode_end: Callable[[], Awaitable[None]]) -> None:
        await on_episode_end()
        self._reply(Confirmed(number))

    def _emit(self, message: EventEmitted) -> None:
        if isinstance(message.event, TrajectoryStarted):
            self.started.add(message.event.trajectory)
        self._sink.emit(message.event)

    def _environments(self, message: EnvironmentsInUse) -> None:
        self.in_use = message.count

    def _spawn(self, number: int, work: Awaitable[None]) -> None:
        task = self._tasks[number] = asyncio.ensure_future(work)
        task.add_done_callback(lambda done: self._ended(number, done))

    def _ended(self, number: int, task: "asyncio.Future[None]") -> None:
        if self._tasks.get(number) is task:
            del self._tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)
