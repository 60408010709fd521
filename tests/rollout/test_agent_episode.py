"""Requests of an agent, in several conversations, through the router."""

import random
from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace
from world import Recorder

from benchmarks.modelled import ModelledEngine
from rollart.core.errors import EngineFailed, EngineLost
from rollart.core.events import TurnDone
from rollart.core.protocols import Engine, TokenStream
from rollart.core.types import Completion, GenerationRequest, Sampling, TokenPart
from rollart.rollout.agent_episode import AgentEpisodeRunner
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.router import Router
from rollart.simulator.clock import run


def episode_on(engines: Mapping[str, Engine], recorder: Recorder) -> AgentEpisodeRunner:
    return AgentEpisodeRunner("e", "t", Router(EngineRegistry(engines)), recorder, lambda version: None)


def request(segment: int, turn: int = 0, tokens: int = 500, branch_of: str = "") -> GenerationRequest:
    session = f"e~{segment}"
    return GenerationRequest(
        f"e/{segment}.{turn}", session, "t", turn, list(range(segment, segment + tokens)), Sampling(), None, branch_of
    )


def test_a_branch_is_served_where_its_conversation_is() -> None:
    async def main() -> list[str]:
        recorder = Recorder()
        engines = {name: ModelledEngine(random.Random(0)) for name in "xyz"}
        episode = episode_on(engines, recorder)
        await episode.generate(request(0))
        for segment in range(1, 6):
            await episode.generate(request(segment, branch_of="e~0"))
        return [event.engine for event in recorder.of(TurnDone)]

    assert len(set(run(main()))) == 1


def test_every_completion_reports_its_oldest_version_and_every_conversation_is_forgotten() -> None:
    async def main() -> None:
        recorder, versions = Recorder(), []
        router = Router(EngineRegistry({"x": ModelledEngine(random.Random(0), version=4)}, 4, recorder))
        episode = AgentEpisodeRunner("e", "t", router, recorder, versions.append)
        for segment in (0, 1):
            await episode.generate(request(segment))
        assert versions == [4, 4]
        assert [event.turn for event in recorder.of(TurnDone)] == [0, 1]
        episode.forget()
        assert not router._sessions

    run(main())


def test_an_empty_completion_is_a_failure_of_the_engine() -> None:
    class Silent(ModelledEngine):
        async def generate(self, request: GenerationRequest) -> Completion:
            return replace(await super().generate(request), tokens=[], finish="abort")

    async def main() -> None:
        recorder = Recorder()
        episode = AgentEpisodeRunner(
            "e",
            "t",
            Router(EngineRegistry({"x": Silent(random.Random(0))}, 0, recorder)),
            recorder,
            lambda version: None,
        )
        with pytest.raises(EngineFailed, match="gave up a request of e"):
            await episode.generate(request(0))

    run(main())


class Streaming(ModelledEngine):
    """Streams two tokens and returns four; a doomed one is lost after the first."""

    doomed = False

    async def generate_in_parts(
        self, request: GenerationRequest, every: int, on_part: Callable[[TokenPart], bool]
    ) -> Completion:
        on_part(TokenPart([1], [-1.0], [0]))
        if self.doomed:
            raise EngineLost("gone")
        on_part(TokenPart([1], [-1.0], [0]))
        return await super().generate(request)


def test_an_answer_goes_on_at_another_engine_from_the_tokens_that_were_streamed() -> None:
    async def main() -> None:
        recorder, received = Recorder(), list[int]()

        def on_tokens(tokens: list[int]) -> bool:
            received.extend(tokens)
            return False

        engines = {name: Streaming(random.Random(0)) for name in "xy"}
        episode = episode_on(engines, recorder)
        await episode.generate(request(0), TokenStream(1, on_tokens))
        (turn,) = recorder.of(TurnDone)
        engines[turn.engine].doomed = True
        received.clear()
        completion = await episode.generate(request(0, 1), TokenStream(1, on_tokens))
        assert received == [1, 1, 1]
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == 5

    run(main())


def test_an_engine_that_cannot_stream_completes_at_once() -> None:
    async def main() -> None:
        episode = episode_on({"x": ModelledEngine(random.Random(0))}, Recorder())
        assert (await episode.generate(request(0), TokenStream(1, lambda tokens: False))).tokens

    run(main())
