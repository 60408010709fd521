"""The engines of a run: which are alive, which version each serves, and how they get to the next one.

Invariants: a lost engine gets no requests until it is replaced, and its owner is notified at once. `serving` is the
oldest version that a new request could meet. An engine loads one version at a time, always the target; one that cannot
load it keeps serving what it has while that is not below `floor`, and is then treated as lost. `floor` never exceeds
the target.
"""

import asyncio
from collections.abc import Callable, Mapping

from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.events import NULL_SINK, EngineSwapped, EventSink, Warned
from rollart.core.protocols import Engine, StreamingEngine
from rollart.core.types import EngineStatus, LoadResult, Publication
from rollart.rollout.engine_state import EnginePool, EngineState

_LOAD_ATTEMPTS, _LOAD_BACKOFF_S = 4, 0.5


class EngineRegistry:
    """`version` is what the first engines serve; an engine without a pool in `pools` is in the pool "engine".

    `on_lost` is called with the name of an engine that cannot go on. `target` is the newest version that engines were
    asked to load, `floor` the oldest that may serve, `revived` is set whenever an engine may have become usable, or was
    removed.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine] | None = None,
        version: int = 0,
        sink: EventSink = NULL_SINK,
        *,
        pools: Mapping[str, EnginePool] | None = None,
        on_lost: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.target, self.floor = version, 0
        self.pools: tuple[EnginePool, ...] = ()
        self.revived = asyncio.Event()
        self._publication: Publication | None = None
        self._engines: dict[str, EngineState] = {}
        self._alive: dict[int, int] = {}  # engines by version
        self._sink, self._on_lost = sink, on_lost
        self._subscribers: list[Callable[[], None]] = []
        for name, engine in (engines or {}).items():
            self._register(name, engine, version, (pools or {}).get(name))

    @property
    def serving(self) -> int:
        alive = self._alive
        return min((version for version in alive if version >= self.floor), default=min(alive, default=self.target))

    @property
    def size(self) -> int:
        """Engines, lost ones that may come back included."""
        return len(self._engines)

    @property
    def empty(self) -> bool:
        """No engine serves, and none will come back."""
        return not self._engines

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call `on_change` whenever `serving` may have moved. Returns what ends the subscription."""
        self._subscribers.append(on_change)
        return lambda: self._subscribers.remove(on_change)

    def _changed(self) -> None:
        for on_change in self._subscribers:
            on_change()

    def require(self, version: int) -> None:
        """From now on requests go only to engines with at least this version."""
        self.floor = version

    # Engines come and go

    def add(self, name: str, engine: Engine, version: int, pool: EnginePool | None = None) -> None:
        """An engine with `version` loaded; it replaces an earlier one of the same name."""
        old = self._engines.get(name)
        if old is not None:
            self._retire(old)
            old.pool.engines.remove(old)
        self._register(name, engine, version, pool or (old.pool if old is not None else None))
        self.revived.set()
        self._changed()

    def _register(self, name: str, client: Engine, version: int, pool: EnginePool | None) -> None:
        if pool is None:
            pool = next((pool for pool in self.pools if pool.name == "engine"), None) or EnginePool("engine")
        if pool not in self.pools:
            self.pools = (*self.pools, pool)
        streaming = client if isinstance(client, StreamingEngine) else None
        self._engines[name] = engine = EngineState(name, pool, client, version, streaming)
        self._count(version, 1)
        pool.engines.append(engine)

    def has(self, name: str, engine: Engine) -> bool:
        """Whether requests may go to this very engine."""
        known = self._engines.get(name)
        return known is not None and known.alive and known.client is engine

    def update_status(self, name: str, status: EngineStatus) -> None:
        """Count work that did not come from here. Requests of ours that started or ended since the engine reported look
        like that too, but not twice in a row."""
        engine = self._engines.get(name)
        if engine is None or not status.kv_budget:
            return
        reserved = status.kv_reserved * engine.pool.kv_tokens // status.kv_budget
        excess = (max(0, status.running + status.waiting - engine.open), max(0, reserved - engine.reserved))
        engine.foreign, engine.foreign_kv = (
            min(now, before) for now, before in zip(excess, engine.last_excess, strict=True)
        )
        engine.last_excess = excess

    def drain(self, name: str) -> None:
        """No new requests go there; those under way end."""
        self._engines[name].draining = True

    def remove(self, name: str) -> None:
        """The engine will not come back."""
        engine = self._engines.pop(name)
        self._retire(engine)
        engine.pool.engines.remove(engine)
        self.revived.set()
        self._changed()

    def mark_lost(self, name: str, reason: str) -> None:
        self.lose(self._engines[name], reason)

    def lose(self, engine: EngineState, reason: str) -> None:
        """As `mark_lost`, unless that very engine has been replaced already."""
        if engine.alive and self._engines.get(engine.name) is engine:
            self._retire(engine)
            self._sink.emit(Warned(message=f"engine {engine.name} is out: {reason}"))
            self._on_lost(engine.name)
            self._changed()

    def _set_version(self, engine: EngineState, version: int) -> None:
        if engine.alive:
            self._count(engine.version, -1)
            self._count(version, 1)
        engine.version = version

    def _retire(self, engine: EngineState) -> None:
        if engine.alive:
            engine.alive = False
            self._count(engine.version, -1)

    def _count(self, version: int, change: int) -> None:
        self._alive[version] = self._alive.get(version, 0) + change
        if not self._alive[version]:
            del self._alive[version]

    # Weights

    async def load(self, publication: Publication) -> None:
        """Bring every living engine to this version, each as soon as it can. Returns when each has it, or a later one,
        or was given up."""
        self.aim_at(publication)
        await asyncio.gather(*(self._load(engine) for engine in list(self._engines.values())))

    def aim_at(self, publication: Publication) -> None:
        """What every engine shall have."""
        self.announce(publication)
        self.target = publication.version
        self.floor = min(self.floor, self.target)

    def announce(self, publication: Publication) -> None:
        """It is the newest. Engines that start from now on load it: the store keeps earlier ones only for those that
        have them, and the others follow with `load`, as soon as the schedule lets them."""
        self._publication = publication

    async def catch_up(self, engine: Engine) -> int:
        """Bring an engine that is not registered yet to the newest version, which may change meanwhile; returns its
        version. Raises EngineFailed."""
        version = (await engine.status()).version
        while version != (newest := self._publication.version if self._publication is not None else self.target):
            if self._publication is None:
                raise EngineFailed(f"version {newest} is not published")
            await engine.load(self._publication)
            version = newest
        return version

    async def _load(self, engine: EngineState) -> None:
        async with engine.loading:
            failures = 0
            while engine.alive and engine.version != self.target and failures < _LOAD_ATTEMPTS:
                assert self._publication is not None
                publication = self._publication
                reason = await self._try_load(engine, publication)
                if reason is None:
                    continue
                failures = failures + 1 if publication is self._publication else 0
                self._sink.emit(Warned(message=f"engine {engine.name} stays at version {engine.version}: {reason}"))
                if publication is self._publication and failures < _LOAD_ATTEMPTS:
                    await asyncio.sleep(_LOAD_BACKOFF_S * 2 ** (failures - 1))
            if failures == _LOAD_ATTEMPTS and engine.version < self.floor:
                self.lose(engine, f"could not load version {self.target}, and version {engine.version} is too old")

    async def _try_load(self, engine: EngineState, publication: Publication) -> str | None:
        """Why the version could not be loaded, or None."""
        clock = asyncio.get_running_loop().time
        began, version = clock(), publication.version
        try:
            loaded = await engine.client.load(publication)
        except EngineLost as error:
            self.lose(engine, f"could not load version {version}: {error}")
            return str(error)
        except EngineFailed as error:
            return f"version {version} could not be loaded: {error}"
        # An engine below the floor returns only with a version that others serve: groups that started since rely on it.
        if engine.version >= self.floor or version >= self.serving:
            self._set_version(engine, version)
        self._sink.emit(_swapped(engine.name, loaded, version, clock() - began))
        self.revived.set()
        self._changed()
        return None


def _swapped(name: str, loaded: LoadResult, version: int, seconds: float) -> EngineSwapped:
    return EngineSwapped(
        engine=name,
        version=version,
        seconds=seconds,
        transfer_s=loaded.transfer_s,
        exposed_s=loaded.exposed_s,
        bytes=loaded.bytes,
        transport=loaded.transport,
        recomputed=loaded.recomputed,
        recompute_s=loaded.recompute_s,
        hops=loaded.hops,
        relay=loaded.relay,
    )
