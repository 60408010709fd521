import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from world import Recorder

from benchmarks.modelled import ModelledEngine
from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.events import PhasesChanged, Warned
from rollart.core.types import Completion, EngineStatus, GenerationRequest, LoadResult, Publication, Sampling
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.phases import PhaseChanges
from rollart.rollout.requests import Routed
from rollart.rollout.router import Router
from rollart.simulator.clock import run


def request(session: str, turn: int = 0) -> GenerationRequest:
    return GenerationRequest(f"{session}/{turn}", session, "t", turn, [ord(session)] * 500, Sampling())


def engine(**settings: Any) -> ModelledEngine:
    return ModelledEngine(random.Random(0), **settings)


def make_router(**engines: ModelledEngine) -> Router:
    return Router(EngineRegistry(engines))


class Broken(ModelledEngine):
    async def load(self, publication: Publication) -> LoadResult:
        raise EngineFailed("no such version")


def test_a_conversation_stays_where_its_prefix_is() -> None:
    async def main() -> None:
        router = make_router(x=engine(), y=engine())
        homes = {session: (await router.generate(request(session))).engine for session in "abcd"}
        for turn in range(1, 4):
            answers = await asyncio.gather(*(router.generate(request(session, turn)) for session in "abcd"))
            assert [answer.engine for answer in answers] == list(homes.values())

    run(main())


def test_new_conversations_spread_over_the_engines() -> None:
    async def main() -> set[str]:
        router = make_router(x=engine(), y=engine())
        answers = await asyncio.gather(*(router.generate(request(session)) for session in "abcdef"))
        return {answer.engine for answer in answers}

    assert run(main()) == {"x", "y"}


def test_phases_have_the_pool_that_answers() -> None:
    async def main() -> None:
        router, sink, phases = make_router(x=engine()), Recorder(), PhaseChanges()
        for id, phase in (("a", "generating"), ("b", "generating"), ("c", "stepping")):
            phases.enter(SimpleNamespace(id=id, phase=""), phase, phase)
        answer = asyncio.create_task(router.generate(request("b")))
        await asyncio.sleep(0)
        phases.sample(sink, router.pool_of)
        (sample,) = sink.of(PhasesChanged)
        assert sample.phases == {"generating": ["a", "b"], "stepping": ["c"]}
        assert sample.pools == {"engine": [1]}
        await answer
        assert router.pool_of("b") == ""

    run(main())


def test_a_failed_request_is_retried_and_finally_reported() -> None:
    async def main() -> None:
        router = make_router(x=engine(failures=1.0))
        with pytest.raises(EngineFailed, match="tried 3 times"):
            await router.generate(request("a"))

    run(main())


def test_a_lost_engine_gets_nothing_until_it_is_replaced() -> None:
    async def main() -> None:
        router = make_router(x=engine(), y=engine())
        router.engines.mark_lost("x", "it died")
        answers = await asyncio.gather(*(router.generate(request(session)) for session in "abcd"))
        assert {answer.engine for answer in answers} == {"y"}
        router.engines.add("x", engine(), 3)
        assert (await router.generate(request("e"))).engine == "x"

    run(main())


def test_a_request_on_a_lost_engine_is_retried_on_another_and_its_owner_is_notified() -> None:
    class Lost(ModelledEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            raise EngineLost("the connection was lost")

    async def main() -> None:
        lost: list[str] = []
        engines = EngineRegistry({"x": Lost(random.Random(0)), "y": engine()}, on_lost=lost.append)
        router = Router(engines)
        answers = await asyncio.gather(*(router.generate(request(session)) for session in "abcd"))
        assert {answer.engine for answer in answers} == {"y"}
        assert lost == ["x"]

    run(main())


def test_requests_wait_while_no_engine_is_alive() -> None:
    async def main() -> Routed:
        router = make_router(x=engine())
        router.engines.mark_lost("x", "it died")
        waiting = asyncio.create_task(router.generate(request("a")))
        await asyncio.sleep(5)
        assert not waiting.done()
        router.engines.add("x", engine(), 0)
        return await waiting

    assert run(main()).engine == "x"


def test_an_engine_that_cannot_load_a_version_keeps_serving_its_own_until_that_is_too_old() -> None:
    async def main() -> None:
        recorder, lost = Recorder(), []
        engines = EngineRegistry({"x": Broken(random.Random(0)), "y": engine()}, sink=recorder, on_lost=lost.append)
        router = Router(engines)
        await router.engines.load(Publication(1))
        assert engines.serving == 0 and not lost
        assert {(await router.generate(request(session))).engine for session in "abc"} == {"x", "y"}
        warned = [event.message for event in recorder.events if isinstance(event, Warned)]
        assert warned == ["engine x stays at version 0: version 1 could not be loaded: no such version"] * 4
        engines.require(1)
        assert engines.serving == 1
        assert {(await router.generate(request(session))).engine for session in "def"} == {"y"}
        await router.engines.load(Publication(2))
        assert lost == ["x"] and engines.serving == 2

    run(main())


def test_an_engine_that_is_busy_for_other_clients_is_avoided() -> None:
    def status(running: int) -> EngineStatus:
        return EngineStatus(0, running, 0, 0, 1 << 30, 0, 0, 0, 0.0, kv_reserved=running << 20)

    async def main() -> None:
        router = make_router(x=engine(), y=engine())
        router.engines.update_status("x", status(50))
        router.engines.update_status("y", status(0))
        assert {(await router.generate(request(session))).engine for session in "ab"} == {"x", "y"}  # may be a fluke
        router.engines.update_status("x", status(50))
        router.engines.update_status("y", status(0))
        assert {(await router.generate(request(session))).engine for session in "cdef"} == {"y"}

    run(main())
