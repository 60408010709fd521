"""The engines that there are: which of them live, which version each has, and how they come to the next.

Invariants: a lost engine gets nothing until it is replaced, and whoever owns it is told at once. `serving` is the
oldest version that a new request could meet. An engine loads one version at a time, always the one aimed at; one that
cannot keeps serving what it has for as long as that is not below `floor`, and is then taken for lost.
"""

import asyncio
from collections.abc import Callable, Mapping

from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.events import EngineSwapped, EventSink, Warned
from rollart.core.protocols import Engine
from rollart.core.types import EngineStatus
from rollart.rollout.engine_state import EnginePool, EngineState

_LOADS, _LOAD_AGAIN_S = 4, 0.5


class EngineRegistry:
    """`pools` says which engine is in which pool; an engine that is not there is in a pool of its own kind, `engine`.

    `on_lost` hears of an engine that cannot go on; `on_change`, which the scheduler sets, that `serving` may have
    moved. `target` is the newest version that engines were told to load, `floor` the oldest that may serve.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        version: int,
        sink: EventSink,
        pools: Mapping[str, EnginePool],
        on_lost: Callable[[str], None],
    ) -> None:
        self.target = version
        self.floor = 0
        self.on_change: Callable[[], None] = lambda: None
        self._pools: dict[str, EnginePool] = {}
        self._kinds: tuple[EnginePool, ...] = ()
        self._places: dict[str, EngineState] = {}
        self._living: dict[int, int] = {}  # engines by version
        self._sink, self._on_lost = sink, on_lost
        self._revived = asyncio.Event()
        for name, engine in engines.items():
            self._put(name, engine, version, pools.get(name))

    @property
    def serving(self) -> int:
        living = self._living
        return min((version for version in living if version >= self.floor), default=min(living, default=self.target))

    # Engines come and go

    def lost(self, name: str, reason: str) -> None:
        self._lose(self._places[name], reason)

    def _lose(self, place: EngineState, reason: str) -> None:
        if place.alive and self._places.get(place.name) is place:
            self._bury(place)
            self._sink.emit(Warned(message=f"engine {place.name} is out: {reason}"))
            self._on_lost(place.name)
            self.on_change()

    def told(self, name: str, status: EngineStatus) -> None:
        """What an engine says of itself: it may have work that did not come from here. Requests of ours that came or
        went since it spoke look like that too, but not twice in a row."""
        place = self._places.get(name)
        if place is None or not status.kv_budget:
            return
        reserved = status.kv_reserved * place.pool.kv_tokens // status.kv_budget
        more = (max(0, status.running + status.waiting - place.open), max(0, reserved - place.reserved))
        place.foreign, place.foreign_kv = (
            min(now, before) for now, before in zip(more, place.unexplained, strict=True)
        )
        place.unexplained = more

    def has(self, name: str, engine: Engine) -> bool:
        """Whether requests may go to this very engine."""
        place = self._places.get(name)
        return place is not None and place.alive and place.engine is engine

    def drain(self, name: str) -> None:
        """Nothing new goes there; what is under way ends."""
        self._places[name].draining = True

    def remove(self, name: str) -> None:
        """The engine will not come back."""
        place = self._places.pop(name)
        self._bury(place)
        place.pool.places.remove(place)
        self.on_change()

    def replace(self, name: str, engine: Engine, version: int, pool: EnginePool | None = None) -> None:
        """An engine came (back) with `version` loaded."""
        old = self._places.get(name)
        if old is not None:
            self._bury(old)
            old.pool.places.remove(old)
        self._put(name, engine, version, pool or (old.pool if old is not None else None))
        self._revived.set()
        self.on_change()

    def _put(self, name: str, engine: Engine, version: int, pool: EnginePool | None) -> None:
        if pool is None:
            pool = self._pools.get("engine") or EnginePool("engine")
        self._pools.setdefault(pool.name, pool)
        self._kinds = tuple(self._pools.values())
        self._places[name] = place = EngineState(name, pool, engine, version)
        self._count(version, 1)
        pool.places.append(place)

    def _move(self, place: EngineState, version: int) -> None:
        if place.alive:
            self._count(place.version, -1)
            self._count(version, 1)
        place.version = version

    def _bury(self, place: EngineState) -> None:
        if place.alive:
            place.alive = False
            self._count(place.version, -1)

    def _count(self, version: int, more: int) -> None:
        self._living[version] = self._living.get(version, 0) + more
        if not self._living[version]:
            del self._living[version]

    # Weights

    async def load(self, version: int) -> None:
        """Bring every living engine to `version`, each as soon as it can. Returns when they have it, or a later one, or
        were given up on."""
        self.target, self.floor = version, min(self.floor, version)
        await asyncio.gather(*(self._load(place) for place in list(self._places.values())))

    async def _load(self, place: EngineState) -> None:
        async with place.loading:
            failures = 0
            while place.alive and place.version != self.target and failures < _LOADS:
                version = self.target
                reason = await self._try_load(place, version)
                if reason is None:
                    continue
                failures = failures + 1 if version == self.target else 0
                self._sink.emit(Warned(message=f"engine {place.name} stays at version {place.version}: {reason}"))
                if version == self.target and failures < _LOADS:
                    await asyncio.sleep(_LOAD_AGAIN_S * 2 ** (failures - 1))
            if failures == _LOADS and place.version < self.floor:
                self._lose(place, f"could not load version {self.target}, and version {place.version} is too old")

    async def _try_load(self, place: EngineState, version: int) -> str | None:
        """Why it could not, if so."""
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            loaded = await place.engine.load(version)
        except EngineLost as error:
            self._lose(place, f"could not load version {version}: {error}")
            return str(error)
        except EngineFailed as error:
            return f"version {version} could not be loaded: {error}"
        # One that was too old comes back only with what is served elsewhere: what started since counts on that.
        if place.version >= self.floor or version >= self.serving:
            self._move(place, version)
        self._sink.emit(
            EngineSwapped(
                engine=place.name,
                version=version,
                seconds=clock() - began,
                transfer_s=loaded.transfer_s,
                exposed_s=loaded.exposed_s,
                bytes=loaded.bytes,
                transport=loaded.transport,
                recomputed=loaded.recomputed,
                recompute_s=loaded.recompute_s,
            )
        )
        self._revived.set()
        self.on_change()
        return None
