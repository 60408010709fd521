"""Requests of an agent, in several conversations, through the router."""

import random

import pytest
from msgspec.structs import replace
from world import Recorder

from benchmarks.modelled import ModelledEngine
from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.events import TurnDone
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest, Sampling
from rollart.rollout.agent_episode import AgentEpisodeRunner
from rollart.rollout.router import Router
from rollart.simulate.clock import run


def request(segment: int, turn: int = 0, tokens: int = 500, branch_of: str = "") -> GenerationRequest:
    session = f"e~{segment}"
    return GenerationRequest(
        f"e/{segment}.{turn}", session, "t", turn, list(range(segment, segment + tokens)), Sampling(), None, branch_of
    )


def test_a_branch_is_served_where_the_conversation_that_it_left_is() -> None:
    async def main() -> list[str]:
        recorder = Recorder()
        engines = {name: ModelledEngine(random.Random(0)) for name in "xyz"}
        driven = AgentEpisodeRunner("e", "t", Router(dict(engines), 0, recorder), recorder, lambda version: None)
        await driven.generate(request(0))
        for segment in range(1, 6):
            await driven.generate(request(segment, branch_of="e~0"))
        return [event.engine for event in recorder.of(TurnDone)]

    assert len(set(run(main()))) == 1


def test_every_answer_tells_its_oldest_version_and_every_conversation_is_forgotten() -> None:
    async def main() -> None:
        recorder, versions = Recorder(), []
        router = Router({"x": ModelledEngine(random.Random(0), version=4)}, 4, recorder)
        driven = AgentEpisodeRunner("e", "t", router, recorder, versions.append)
        for segment in (0, 1):
            await driven.generate(request(segment))
        assert versions == [4, 4]
        assert [event.turn for event in recorder.of(TurnDone)] == [0, 1]
        driven.forget()
        assert not router._sessions

    run(main())


def test_an_answer_that_is_none_is_the_engines_failure() -> None:
    class Silent(ModelledEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            return replace(await super().generate(request), tokens=[], finish="abort")

    async def main() -> None:
        recorder = Recorder()
        driven = AgentEpisodeRunner(
            "e", "t", Router({"x": Silent(random.Random(0))}, 0, recorder), recorder, lambda version: None
        )
        with pytest.raises(EngineFailed, match="gave up a request of e"):
            await driven.generate(request(0))

    run(main())


class Streaming(ModelledEngine):
    """Tells of two tokens, and is then lost if it is to be."""

    doomed = False

    async def stream(self, request: GenerationRequest, listener: TokenStream) -> Completion:
        listener.on_tokens([1])
        if self.doomed:
            raise EngineLost("gone")
        listener.on_tokens([2])
        return await super().generate(request)


def test_what_was_heard_of_a_lost_engine_is_void_before_another_begins() -> None:
    async def main() -> None:
        recorder, heard = Recorder(), list[object]()

        def on_tokens(tokens: list[int]) -> bool:
            heard.append(tokens)
            return False

        engines = {name: Streaming(random.Random(0)) for name in "xy"}
        driven = AgentEpisodeRunner("e", "t", Router(dict(engines), 0, recorder), recorder, lambda version: None)
        await driven.generate(request(0), TokenStream(1, on_tokens, heard.clear))
        (told,) = recorder.of(TurnDone)
        engines[told.engine].doomed = True
        heard.clear()
        await driven.generate(request(0, 1), TokenStream(1, on_tokens, lambda: heard.append("anew")))
        assert heard == [[1], "anew", [1], [2]]

    run(main())


def test_an_engine_that_cannot_stream_gives_its_answer_whole_and_a_listener_may_refuse_another_attempt() -> None:
    async def main() -> None:
        recorder = Recorder()
        engine = ModelledEngine(random.Random(0))
        driven = AgentEpisodeRunner("e", "t", Router({"x": engine}, 0, recorder), recorder, lambda version: None)

        def on_restart() -> None:
            raise EngineFailed("it was shown already")

        listener = TokenStream(1, lambda tokens: False, on_restart)
        assert (await driven.generate(request(0), listener)).tokens
        engine.failures = 1.0
        with pytest.raises(EngineFailed, match="shown already"):
            await driven.generate(request(1), listener)

    run(main())
