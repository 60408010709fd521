"""Requests that wait for the controller to pull them."""

import asyncio

import pytest

from rollart.errors import EngineFailed
from rollart.gateway.upstream import Given, Upstream
from rollart.types import Completion, GenerationRequest, Sampling


def request(number: int, episode: str = "e") -> GenerationRequest:
    return GenerationRequest(f"{episode}/{number}", episode, "t", 0, [number], Sampling())


def completion(token: int) -> Completion:
    return Completion([token], [-1.0], [0], "stop")


def test_requests_are_pulled_together_once_and_answered_in_any_order() -> None:
    async def main() -> None:
        upstream = Upstream()
        asked = [asyncio.create_task(upstream.generate(request(number))) for number in range(3)]
        await asyncio.sleep(0)
        pulled = await upstream.pull()
        assert [wanted.request and wanted.request.tokens for wanted in pulled] == [[0], [1], [2]]
        await upstream.answer([Given(wanted.number, completion(wanted.number + 10)) for wanted in reversed(pulled)])
        answers = await asyncio.gather(*asked)
        assert [answer.tokens[0] - 10 for answer in answers] == [wanted.number for wanted in pulled]
        waiting = asyncio.create_task(upstream.pull())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(main())


def test_a_caller_that_gives_up_is_told_to_the_controller_and_a_late_answer_is_dropped() -> None:
    async def main() -> None:
        upstream = Upstream()
        asked = asyncio.create_task(upstream.generate(request(0)))
        await asyncio.sleep(0)
        (wanted,) = await upstream.pull()
        asked.cancel()
        await asyncio.wait([asked])
        (given_up,) = await upstream.pull()
        assert (given_up.number, given_up.request) == (wanted.number, None)
        await upstream.answer([Given(wanted.number, completion(1))])

    asyncio.run(main())


def test_a_failure_of_the_engines_reaches_the_caller_with_its_reason() -> None:
    async def main() -> None:
        upstream = Upstream()
        asked = asyncio.create_task(upstream.generate(request(0, "task-000001.3")))
        await asyncio.sleep(0)
        (wanted,) = await upstream.pull()
        assert wanted.episode == "task-000001.3"
        await upstream.answer([Given(wanted.number, error="none is left")])
        with pytest.raises(EngineFailed, match="none is left"):
            await asked

    asyncio.run(main())
