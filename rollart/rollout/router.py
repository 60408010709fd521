"""Which engine serves a request, and what happens when it does not.

Invariants: a conversation stays on the engine that holds its prefix while that engine lives; a lost engine gets nothing
until it is replaced, and whoever owns it is told at once; a request is tried at most `attempts` times; `serving` is the
oldest version that a new request could meet. Cancelling `generate` aborts the request at the engine.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rollart.errors import EngineFailed, EngineLost
from rollart.observe.events import EngineSwapped, EventSink, Warned
from rollart.protocols import Engine
from rollart.types import Completion, GenerationRequest

_REVIVAL_DEADLINE = 120.0


@dataclass(slots=True)
class _Place:
    name: str
    engine: Engine
    version: int
    open: int = 0
    alive: bool = True


class Router:
    """`on_lost` hears of an engine that cannot go on; `on_change`, which the scheduler sets, that `serving` may have
    moved. `target` is the newest version that engines were told to load."""

    def __init__(
        self,
        engines: dict[str, Engine],
        version: int,
        sink: EventSink,
        *,
        on_lost: Callable[[str], None] = lambda name: None,
        attempts: int = 3,
    ) -> None:
        self._places = {name: _Place(name, engine, version) for name, engine in engines.items()}
        self._sessions: dict[str, str] = {}
        self._sink = sink
        self._attempts = attempts
        self._revived = asyncio.Event()
        self._on_lost = on_lost
        self.on_change: Callable[[], None] = lambda: None
        self.target = version

    @property
    def serving(self) -> int:
        return min((place.version for place in self._places.values() if place.alive), default=self.target)

    async def generate(self, request: GenerationRequest) -> tuple[str, Completion]:
        """The name of the engine and its answer. Raises EngineFailed after the last attempt."""
        reason = "no engine was tried"
        for _ in range(self._attempts):
            place = await self._place(request.session)
            place.open += 1
            try:
                return place.name, await place.engine.generate(request)
            except EngineFailed as error:
                reason = str(error)
                self._sessions.pop(request.session, None)
                if isinstance(error, EngineLost):
                    self._lose(place, reason)
            finally:
                place.open -= 1
        raise EngineFailed(f"{reason} (tried {self._attempts} times)")

    async def _place(self, session: str) -> _Place:
        held = self._sessions.get(session)
        if held is not None and self._places[held].alive:
            return self._places[held]
        alive = [place for place in self._places.values() if place.alive] or await self._revival()
        place = min(alive, key=lambda place: place.open)
        self._sessions[session] = place.name
        return place

    async def _revival(self) -> list[_Place]:
        """Wait until some engine lives again."""
        try:
            async with asyncio.timeout(_REVIVAL_DEADLINE):
                while not (alive := [place for place in self._places.values() if place.alive]):
                    self._revived.clear()
                    await self._revived.wait()
        except TimeoutError:
            raise EngineFailed(f"no engine came back within {_REVIVAL_DEADLINE:g} s") from None
        return alive

    def forget(self, session: str) -> None:
        """The conversation is over."""
        self._sessions.pop(session, None)

    def lost(self, name: str, reason: str) -> None:
        self._lose(self._places[name], reason)

    def _lose(self, place: _Place, reason: str) -> None:
        if place.alive and self._places[place.name] is place:
            place.alive = False
            self._sink.emit(Warned(message=f"engine {place.name} is out: {reason}"))
            self._on_lost(place.name)

    def replace(self, name: str, engine: Engine, version: int) -> None:
        """An engine came (back) with `version` loaded."""
        self._places[name] = _Place(name, engine, version)
        self._revived.set()
        self.on_change()

    async def load(self, version: int) -> None:
        """Bring every living engine to `version`. One that cannot is left out until it is replaced."""
        self.target = version
        await asyncio.gather(*(self._load(place, version) for place in self._places.values() if place.alive))
        self.on_change()

    async def _load(self, place: _Place, version: int) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await place.engine.load(version)
        except EngineFailed as error:
            self._lose(place, f"could not load version {version}: {error}")
            return
        place.version = version
        self._sink.emit(EngineSwapped(engine=place.name, version=version, seconds=clock() - began))
