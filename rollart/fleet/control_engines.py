"""The engines of a run as the control plane sees them when it is recorded or replayed."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rollart.core.events import EventSink
from rollart.core.types import Completion, EngineStatus, GenerationRequest, LoadResult, Publication, TokenPart
from rollart.fleet.control_tape import CONTROL, ControlTape, Tape, controlled, outside
from rollart.hardware.roofline import Roofline
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.engine_state import EnginePool


class TapedEngine:
    def __init__(self, tape: ControlTape, name: str, real: Any, url: str | None) -> None:
        self._tape, self._name, self.real, self.url = tape, name, real, url

    async def generate(self, request: GenerationRequest) -> Completion:
        return await self._tape.call(self._asked("generates", request), Completion, lambda: self.real.generate(request))

    async def generate_in_parts(
        self, request: GenerationRequest, every: int, on_part: Callable[[TokenPart], bool]
    ) -> Completion:
        name = self._asked("generates", request)
        work = lambda record: self.real.generate_in_parts(request, every, record)  # noqa: E731
        return await self._tape.call_in_parts(name, Completion, TokenPart, work, on_part)

    async def prefill(self, request: GenerationRequest) -> int:
        return await self._tape.call(self._asked("prefills", request), int, lambda: self.real.prefill(request))

    async def abort(self, request_id: str) -> None:
        await self._tape.call(f"{self._name} aborts {request_id}", None, lambda: self.real.abort(request_id))

    async def load(self, publication: Publication) -> LoadResult:
        name = f"{self._name} loads version {publication.version}"
        return await self._tape.call(name, LoadResult, lambda: self.real.load(publication))

    async def status(self) -> EngineStatus:
        return await self._tape.call(f"{self._name} reports its status", EngineStatus, lambda: self.real.status())

    def _asked(self, verb: str, request: GenerationRequest) -> str:
        return f"{self._name} {verb} {request.id} after {len(request.tokens)} tokens, {request.resumed} of them resumed"


class PoolSpec(Struct, frozen=True):
    """What makes an `EnginePool`."""

    name: str
    roofline: Roofline
    max_batch: int
    kv_tokens: int
    of: str

    @classmethod
    def of_pool(cls, pool: EnginePool) -> "PoolSpec":
        return cls(pool.name, pool.roofline, pool.max_batch, pool.kv_tokens, pool.of)

    def pool(self) -> EnginePool:
        return EnginePool(self.name, self.roofline, self.max_batch, self.kv_tokens, of=self.of)


class RecordedRegistry(EngineRegistry):
    """Whoever owns the engines calls it from outside."""

    def __init__(self, tape: Tape, *, version: int, sink: EventSink, on_lost: Callable[[str], None]) -> None:
        super().__init__(version=version, sink=tape.sink(sink), on_lost=lambda name: outside(lambda: on_lost(name)))
        self._tape = tape

    def add(self, name: str, engine: Any, version: int, pool: EnginePool | None = None) -> None:
        assert pool is not None
        url = getattr(engine, "url", None)
        self._tape.external("add", name, version, url, PoolSpec.of_pool(pool))
        taped = TapedEngine(self._tape, name, engine, url)
        controlled(lambda: super(RecordedRegistry, self).add(name, taped, version, pool))

    def has(self, name: str, engine: Any) -> bool:
        known = self._engines.get(name)
        return known is not None and known.alive and getattr(known.client, "real", None) is engine

    def update_status(self, name: str, status: EngineStatus) -> None:
        self._tape.external("update_status", name, status)
        controlled(lambda: super(RecordedRegistry, self).update_status(name, status))

    def remove(self, name: str) -> None:
        self._tape.external("remove", name)
        controlled(lambda: super(RecordedRegistry, self).remove(name))

    def mark_lost(self, name: str, reason: str) -> None:
        self._tape.external("mark_lost", name, reason)
        controlled(lambda: super(RecordedRegistry, self).mark_lost(name, reason))

    def aim_at(self, publication: Publication) -> None:
        if not CONTROL.get():  # the training loop calls it too
            self._tape.external("aim_at", public(publication))
        controlled(lambda: super(RecordedRegistry, self).aim_at(publication))


def inbound_calls(
    registry: EngineRegistry, engine: Callable[[str, str | None], TapedEngine]
) -> dict[str, tuple[tuple[Any, ...], Callable[..., None]]]:
    """What `RecordedRegistry` records, with the types of the arguments, for a replay."""
    pools: dict[str, EnginePool] = {}

    def add(name: str, version: int, url: str | None, spec: PoolSpec) -> None:
        registry.add(name, engine(name, url), version, pools.setdefault(spec.name, spec.pool()))

    return {
        "add": ((str, int, str | None, PoolSpec), add),
        "update_status": ((str, EngineStatus), registry.update_status),
        "remove": ((str,), registry.remove),
        "mark_lost": ((str, str), registry.mark_lost),
        "aim_at": ((Publication,), registry.aim_at),
    }


def public(publication: Publication) -> Publication:
    """Without its key."""
    return replace(publication, key=None)
