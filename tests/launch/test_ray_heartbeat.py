"""The heartbeat of a Ray node, on virtual time with actors that reply or not; no cluster needed."""

import asyncio
from concurrent.futures import Future

import pytest

pytest.importorskip("ray")
from rollart.launch import ray_heartbeat
from rollart.launch.ray_heartbeat import BEAT_S, LATE_S, RECONNECT_S, SILENT_S, NodeHeartbeat
from rollart.simulator.clock import run


class Pinged:
    """An actor, and its method `ping`, as Ray calls them."""

    def __init__(self) -> None:
        self.silent, self.calls = False, 0
        self.ping = self

    def remote(self) -> "Pinged":
        self.calls += 1
        return self

    def future(self) -> Future[None]:
        reply: Future[None] = Future()
        if not self.silent:
            reply.set_result(None)
        return reply


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool | None]:
    state: dict[str, bool | None] = {"open": True}

    async def listening(address: str, port: int) -> bool | None:
        return state["open"]

    monkeypatch.setattr(ray_heartbeat, "_is_listening", listening)
    return state


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.usefixtures("port")
def test_a_node_is_asked_as_often_with_many_services_as_with_one() -> None:
    async def main(count: int) -> int:
        heartbeat, actors = NodeHeartbeat("node", 1), [Pinged() for _ in range(count)]
        lost = [heartbeat.join(actor) for actor in actors]
        await asyncio.sleep(20 * BEAT_S)
        assert not any(each.done() for each in lost)
        for actor in actors:
            heartbeat.leave(actor)
        await asyncio.sleep(2 * BEAT_S)
        calls = sum(actor.calls for actor in actors)
        assert max(actor.calls for actor in actors) - min(actor.calls for actor in actors) <= 1  # all in turn
        await asyncio.sleep(10 * BEAT_S)
        assert sum(actor.calls for actor in actors) == calls  # it ends with the last
        return calls

    assert run(main(8)) == run(main(1))


@pytest.mark.parametrize("is_open", [True, False, None])
def test_a_node_on_which_nothing_replies_is_lost_with_all_its_services(
    port: dict[str, bool | None], is_open: bool | None
) -> None:
    async def main() -> float:
        heartbeat, actors = NodeHeartbeat("node", 1), [Pinged() for _ in range(3)]
        lost = [heartbeat.join(actor) for actor in actors]
        await asyncio.sleep(5 * BEAT_S)
        port["open"] = is_open
        for actor in actors:
            actor.silent = True
        began = now()
        assert await asyncio.gather(*lost) == ["it does not reply"] * 3
        return now() - began

    # A closed port proves it; one that cannot be reached proves nothing.
    within = BEAT_S + (LATE_S if is_open is False else SILENT_S + 2 * LATE_S + RECONNECT_S)
    assert run(main()) <= within


@pytest.mark.usefixtures("port")
def test_one_silent_service_is_lost_alone() -> None:
    async def main() -> None:
        heartbeat, actors = NodeHeartbeat("node", 1), [Pinged() for _ in range(3)]
        lost = [heartbeat.join(actor) for actor in actors]
        actors[1].silent = True
        assert await lost[1] == "it does not reply"
        heartbeat.leave(actors[1])
        await asyncio.sleep(20 * BEAT_S)
        assert not lost[0].done()
        assert not lost[2].done()
        for actor in actors:
            heartbeat.leave(actor)
        await asyncio.sleep(BEAT_S)

    run(main())
