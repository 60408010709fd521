"""Which engine serves a request, and what happens when it does not.

Invariants: a request goes only to an engine that lives, is not draining and has at least version `floor`; if there is
none it waits, with a deadline. A lost engine gets nothing until it is replaced, and whoever owns it is told at once. A
request is tried at most `attempts` times. `serving` is the oldest version that a new request could meet. An engine
loads one version at a time, always the one aimed at; one that cannot keeps serving what it has for as long as that is
not below `floor`, and is then taken for lost. Cancelling `generate` aborts the request at the engine. What a request
adds to an engine's load is taken off again, once, however it ends.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace

from msgspec import Struct

from rollart.compact import fingerprint
from rollart.errors import EngineFailed, EngineLost
from rollart.observe.events import EngineSwapped, EventSink, Warned
from rollart.protocols import Engine, Listener, StreamingEngine
from rollart.rollout.places import EnginePool, Place
from rollart.rollout.routing import Ask, Choice, Measured, Policy, Why
from rollart.rollout.shapes import TaskShapes
from rollart.types import Completion, EngineStatus, GenerationRequest

_PATIENCE_S = 120.0
_OPENINGS = 4096
_LOADS, _LOAD_AGAIN_S = 4, 0.5


class Routed(Struct):
    """An answer, the engine and pool that gave it, why it was asked, and the seconds that were predicted for it."""

    completion: Completion
    engine: str
    pool: str
    why: Why
    predicted_s: float
    prefilled_by: str = ""


class _Held(Struct):
    """Where a conversation's KV is: `cached` tokens, made by `version`."""

    place: Place
    cached: int
    version: int


class Router:
    """`pools` says which engine is in which pool; an engine that is not there is in a pool of its own kind, `engine`.

    `on_lost` hears of an engine that cannot go on; `on_change`, which the scheduler sets, that `serving` may have
    moved. `target` is the newest version that engines were told to load. `keeps_kv`: KV survives a weight swap.
    `patience`: how long a request waits for an engine that may have it.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        version: int,
        sink: EventSink,
        *,
        pools: Mapping[str, EnginePool] | None = None,
        policy: Policy | None = None,
        affinity: Mapping[str, str | tuple[str, ...]] | None = None,
        shapes: TaskShapes | None = None,
        on_lost: Callable[[str], None] = lambda name: None,
        attempts: int = 3,
        keeps_kv: bool = False,
        patience: float = _PATIENCE_S,
    ) -> None:
        self.shapes = shapes or TaskShapes()
        self._patience = patience
        self.target = version
        self.floor = 0
        self.on_change: Callable[[], None] = lambda: None
        self._pools: dict[str, EnginePool] = {}
        self._kinds: tuple[EnginePool, ...] = ()
        self._places: dict[str, Place] = {}
        self._living: dict[int, int] = {}  # engines by version
        self._policy = policy or Measured()
        self._affinity = dict(affinity or {})
        self._sessions: dict[str, _Held] = {}
        self._openings: OrderedDict[int, _Held] = OrderedDict()  # a plain dict is slow to lose its first key
        self._sink, self._on_lost, self._attempts, self._keeps_kv = sink, on_lost, attempts, keeps_kv
        self._revived = asyncio.Event()
        for name, engine in engines.items():
            self._put(name, engine, version, (pools or {}).get(name))

    @property
    def serving(self) -> int:
        living = self._living
        return min((version for version in living if version >= self.floor), default=min(living, default=self.target))

    async def generate(self, request: GenerationRequest, listener: Listener | None = None) -> Routed:
        """Raises EngineFailed after the last attempt, or if the listener cannot do with another one."""
        reason = "no engine was tried"
        clock = asyncio.get_running_loop().time
        for _ in range(self._attempts):
            choice = self._choose(request, clock()) or await self._revival(request)
            place, began = choice.place, clock()
            tokens, most = len(request.tokens), request.sampling.max_tokens  # the context grows while it is away
            until = self._begin(choice, request, began)
            try:
                asked = request
                if choice.prefill_at is not None:
                    choice.prefill_at.take(tokens, 0)
                    try:
                        asked = await self._prefill(choice.prefill_at, request)
                    finally:
                        choice.prefill_at.give_back(tokens, 0)
                if listener is not None and isinstance(place.engine, StreamingEngine):
                    completion = await place.engine.stream(asked, listener)
                else:
                    completion = await place.engine.generate(asked)
            except EngineFailed as error:
                reason = str(error)
                self._sessions.pop(request.session, None)
                if isinstance(error, EngineLost):
                    self._lose(place, reason)
                if listener is not None:
                    listener.anew()
            else:
                self._learn(request, choice, completion, began, until, clock() - began)
                prefilled_by = choice.prefill_at.name if choice.prefill_at is not None else ""
                return Routed(
                    completion, place.name, place.pool.name, choice.why, choice.prediction.seconds, prefilled_by
                )
            finally:
                place.give_back(tokens, most)
        raise EngineFailed(f"{reason} (tried {self._attempts} times)")

    def _choose(self, request: GenerationRequest, now: float) -> Choice | None:
        held = self._sessions.get(request.session) or self._sessions.get(request.branch_of)
        cached, shared, tokens = 0, None, len(request.tokens)
        if held is not None:
            cached = held.cached if self._keeps_kv or held.version == held.place.version else 0
            cached = min(cached, tokens - 1)  # a branch may be shorter than what it left
        elif request.turn == 0:
            opened = self._openings.get(fingerprint(request.tokens))
            if opened is not None and (self._keeps_kv or opened.version == opened.place.version):
                shared = opened.place
        most = request.sampling.max_tokens
        ask = Ask(
            tokens,
            self.shapes.decoded(request.task, request.turn, most),
            most,
            now,
            self.floor,
            self._affinity.get(request.task, "auto"),
            held.place if held is not None else None,
            cached,
            shared,
            request.task,
        )
        return self._policy.choose(ask, self._kinds)

    def _begin(self, choice: Choice, request: GenerationRequest, now: float) -> float:
        """Counts the request where it goes; answers when the prefill there should be done, its own included."""
        place, tokens = choice.place, len(request.tokens)
        place.take(tokens, request.sampling.max_tokens)
        busy = choice.prefill_at or place
        place.pool.expect(choice.prediction.seconds)
        busy.prefill(choice.prediction.work, now)
        if request.turn == 0:
            if len(self._openings) >= _OPENINGS:
                self._openings.popitem(last=False)
            self._openings[fingerprint(request.tokens)] = _Held(place, tokens - 1, place.version)
        return busy.prefill_until

    async def _prefill(self, place: Place, request: GenerationRequest) -> GenerationRequest:
        """A hand-over is an optimisation: if the prefill fails there, the decoding engine does it itself."""
        address = getattr(place.engine, "url", None)
        try:
            await place.engine.prefill(request)
        except EngineFailed as error:
            if isinstance(error, EngineLost):
                self._lose(place, str(error))
            return request
        return replace(request, kv_from=address)

    def _learn(
        self,
        request: GenerationRequest,
        choice: Choice,
        completion: Completion,
        began: float,
        until: float,
        seconds: float,
    ) -> None:
        place, pool, made = choice.place, choice.place.pool, len(completion.tokens)
        self.shapes.saw(request.task, request.turn, made)
        version = completion.versions[-1] if completion.versions else place.version
        self._sessions[request.session] = _Held(place, len(request.tokens) + made - 1, version)
        pool.took(seconds)
        if choice.prefill_at is not None or not made:
            return
        first_s, prediction = completion.queue_s + completion.prefill_s, choice.prediction
        prefill_factor, decode_factor = prediction.factors
        if not prediction.room and prediction.wait < prediction.prefill:  # else it tells of the queue
            roofline = (prediction.prefill + prediction.token) / prefill_factor
            pool.learn_prefill(roofline, first_s - prediction.wait, completion.prompt - completion.cached)
        pool.learn_decode(prediction.token / decode_factor * (made - 1), completion.decode_s, made - 1)
        # Its own prefill was over at its first token; what came later is all that can be left.
        place.prefill_until = min(place.prefill_until, began + first_s + place.prefill_until - until)

    async def _revival(self, request: GenerationRequest) -> Choice:
        """Wait until some engine may have the request."""
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._patience):
                while (choice := self._choose(request, clock())) is None:
                    self._revived.clear()
                    await self._revived.wait()
        except TimeoutError:
            raise EngineFailed(f"no engine came back within {self._patience:g} s") from None
        return choice

    def forget(self, session: str) -> None:
        """The conversation is over."""
        self._sessions.pop(session, None)

    # Engines come and go

    def lost(self, name: str, reason: str) -> None:
        self._lose(self._places[name], reason)

    def _lose(self, place: Place, reason: str) -> None:
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
        self._places[name] = place = Place(name, pool, engine, version)
        self._count(version, 1)
        pool.places.append(place)

    def _move(self, place: Place, version: int) -> None:
        if place.alive:
            self._count(place.version, -1)
            self._count(version, 1)
        place.version = version

    def _bury(self, place: Place) -> None:
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

    async def _load(self, place: Place) -> None:
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

    async def _try_load(self, place: Place, version: int) -> str | None:
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
