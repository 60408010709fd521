"""A player's router and the controller's desk, wired without a connection, on virtual time."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from world import Recorder, StreamingModel

from rollart.core.errors import EngineFailed
from rollart.core.types import GenerationRequest, Sampling
from rollart.engines.client import EngineClient
from rollart.players.desk import RoutingDesk
from rollart.players.messages import PlayerMessage, Reply
from rollart.players.player import ControllerLine, PlayerRouter
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.episode_clock import EpisodeClock
from rollart.rollout.router import Router
from rollart.simulator.clock import run

_encode = msgspec.msgpack.encode


class Addressed(StreamingModel):
    """An engine with an address, as those of a run have."""

    key = "secret"

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(random.Random(0), **settings)
        self.url = url


class DirectRouter(PlayerRouter):
    """Without connections: engines by their address."""

    def __init__(self, line: ControllerLine, engines: dict[str, Addressed]) -> None:
        super().__init__(line, 60.0)
        self._by_url = {engine.url: engine for engine in engines.values()}

    async def _client(self, url: str) -> EngineClient:
        return self._by_url[url]  # type: ignore[return-value]


class Pair:
    """A desk and a router that send each other encoded messages, each a turn of the loop later."""

    def __init__(self, engines: dict[str, Addressed]) -> None:
        self.registry = EngineRegistry(engines)
        self.bugs: list[BaseException] = []
        self.desk = RoutingDesk(Router(self.registry), Recorder(), {}, send=self._reply, on_bug=self.bugs.append)
        self.line = ControllerLine(self._tell, self._tell)
        self.router = DirectRouter(self.line, engines)

    def _tell(self, message: PlayerMessage) -> None:
        asyncio.get_running_loop().call_soon(self.desk.receive, _encode([message]))

    def _reply(self, reply: Reply) -> None:
        decoded = msgspec.msgpack.decode(_encode(reply), type=Reply)
        asyncio.get_running_loop().call_soon(self.line.on_reply, decoded)

    @property
    def reserved(self) -> int:
        return sum(engine.reserved + engine.open for pool in self.registry.pools for engine in pool.engines)


def request(session: str, turn: int = 0) -> GenerationRequest:
    return GenerationRequest(
        f"{session}/{turn}", session, "t", turn, [ord(session)] * (100 + turn), Sampling(max_tokens=8)
    )


def test_requests_follow_the_central_router_and_are_released() -> None:
    async def main() -> None:
        pair = Pair({"x": Addressed("http://x"), "y": Addressed("http://y")})
        first = await asyncio.gather(*(pair.router.generate(request(session)) for session in "abcd"))
        assert {routed.engine for routed in first} == {"x", "y"}
        again = await asyncio.gather(*(pair.router.generate(request(session, 1)) for session in "abcd"))
        assert [routed.engine for routed in again] == [routed.engine for routed in first]
        assert {routed.why for routed in again} == {"prefix"}
        assert pair.reserved == 0
        assert not pair.bugs

    run(main())


def test_a_cancelled_request_releases_its_engine_and_aborts_there() -> None:
    async def main() -> None:
        pair = Pair({"x": Addressed("http://x", seconds=lambda rng: 8.0)})
        waiting = asyncio.create_task(pair.router.generate(request("a")))
        await asyncio.sleep(0.1)
        assert pair.reserved
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(0.001)
        assert pair.reserved == 0
        assert pair.registry.pools[0].engines[0].client.aborted == 1  # type: ignore[attr-defined]

    run(main())


def test_while_no_engine_can_take_a_request_its_clock_stands_still() -> None:
    async def main() -> None:
        engine = Addressed("http://x")
        pair, clock = Pair({"x": engine}), EpisodeClock(5.0)
        pair.registry.mark_lost("x", "it died")
        async with clock.limit():
            answer = asyncio.create_task(pair.router.generate(request("a"), clock=clock))
            await asyncio.sleep(60.0)
            assert not answer.done()
            pair.registry.add("x", engine, 0)
            assert (await answer).engine == "x"
        assert clock.waited_s == pytest.approx(60.0, abs=0.1)

    run(main())


def test_a_request_fails_when_no_engine_is_left() -> None:
    async def main() -> None:
        pair = Pair({"x": Addressed("http://x")})
        pair.registry.mark_lost("x", "it died")
        answer = asyncio.create_task(pair.router.generate(request("a")))
        await asyncio.sleep(1.0)
        pair.registry.remove("x")
        with pytest.raises(EngineFailed, match="no engine is left"):
            await answer

    run(main())


def test_an_answer_goes_on_at_another_engine_when_one_is_lost() -> None:
    async def main() -> None:
        engines = {name: Addressed(f"http://{name}", seconds=lambda rng: 8.0) for name in "xy"}
        pair = Pair(engines)
        answer = asyncio.create_task(pair.router.generate(request("a")))
        await asyncio.sleep(0.5)
        busy = next(engine for engine in engines.values() if engine.running)
        busy.lose()
        routed = await answer
        assert pair.registry.size == 2 and not pair.registry.has(*next(e for e in engines.items() if e[1] is busy))
        assert engines[routed.engine] is not busy
        assert pair.reserved == 0

    run(main())


def test_what_a_player_that_ended_had_reserved_is_released() -> None:
    async def main() -> None:
        pair = Pair({"x": Addressed("http://x", seconds=lambda rng: 8.0), "y": Addressed("http://y")})
        pair.registry.mark_lost("y", "it died")
        answers = [asyncio.create_task(pair.router.generate(request(session))) for session in "ab"]
        await asyncio.sleep(0.1)
        assert pair.reserved
        pair.desk.close()
        assert pair.reserved == 0
        for answer in answers:
            answer.cancel()
        await asyncio.wait(answers)
        assert pair.reserved == 0

    run(main())
