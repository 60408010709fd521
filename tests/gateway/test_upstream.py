"""Requests that wait for the controller to be told of them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rollart.core.errors import EngineFailed
from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest, Sampling
from rollart.gateway.upstream import PullReply, PullRequest, Upstream


def request(number: int, episode: str = "e") -> GenerationRequest:
    return GenerationRequest(f"{episode}/{number}", episode, "t", 0, [number], Sampling(), episode=episode)


def completion(token: int) -> Completion:
    return Completion([token], [-1.0], [0], "stop")


@contextmanager
def pulling(upstream: Upstream) -> Iterator[list[PullRequest]]:
    """All that the controller is told of while the block lasts."""
    told: list[PullRequest] = []

    def tell(wanted: object) -> None:
        assert isinstance(wanted, PullRequest)
        told.append(wanted)

    task = asyncio.create_task(upstream.pull(tell))
    try:
        yield told
    finally:
        task.cancel()


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_requests_are_told_once_and_answered_in_any_order() -> None:
    async def main() -> None:
        upstream = Upstream()
        asked = [asyncio.create_task(upstream.generate(request(number))) for number in range(2)]
        await turns()
        with pulling(upstream) as told:
            await turns()
            asked.append(asyncio.create_task(upstream.generate(request(2))))
            await turns()
        assert [wanted.request and wanted.request.tokens for wanted in told] == [[0], [1], [2]]
        await upstream.answer([PullReply(wanted.number, completion(wanted.number + 10)) for wanted in reversed(told)])
        answers = await asyncio.gather(*asked)
        assert [answer.tokens[0] - 10 for answer in answers] == [wanted.number for wanted in told]
        with pulling(upstream) as again:
            await turns()
        assert not again

    asyncio.run(main())


def test_what_comes_between_two_pulls_waits_for_the_next() -> None:
    async def main() -> None:
        upstream = Upstream()
        with pulling(upstream):
            await turns()
        await turns()
        asked = asyncio.create_task(upstream.generate(request(0)))
        await turns()
        with pulling(upstream) as told:
            await turns()
        assert len(told) == 1
        asked.cancel()

    asyncio.run(main())


def test_a_caller_that_gives_up_is_told_to_the_controller_and_a_late_answer_is_dropped() -> None:
    async def main() -> None:
        upstream = Upstream()
        with pulling(upstream) as told:
            asked = asyncio.create_task(upstream.generate(request(0)))
            await turns()
            asked.cancel()
            await asyncio.wait([asked])
        wanted, given_up = told
        assert (given_up.number, given_up.request, given_up.enough) == (wanted.number, None, False)
        await upstream.answer([PullReply(wanted.number, completion(1))])

    asyncio.run(main())


def test_a_failure_of_the_engines_reaches_the_caller_with_its_reason() -> None:
    async def main() -> None:
        upstream = Upstream()
        with pulling(upstream) as told:
            asked = asyncio.create_task(upstream.generate(request(0, "task-000001.3")))
            await turns()
        assert told[0].episode == "task-000001.3"
        await upstream.answer([PullReply(told[0].number, error="none is left")])
        with pytest.raises(EngineFailed, match="none is left"):
            await asked

    asyncio.run(main())


def test_a_listener_hears_tokens_until_it_has_enough_which_the_controller_is_told_once() -> None:
    async def main() -> None:
        upstream, heard = Upstream(), []

        def on_tokens(tokens: list[int]) -> bool:
            heard.extend(tokens)
            return len(heard) >= 2

        with pulling(upstream) as told:
            listener = TokenStream(1, on_tokens, heard.clear)
            asked = asyncio.create_task(upstream.generate(request(0), listener))
            await turns()
            number = told[0].number
            await upstream.answer([PullReply(number, tokens=[9]), PullReply(number, restart=True)])
            assert heard == [] and told[0].every == 1
            await upstream.answer([PullReply(number, tokens=[token]) for token in (1, 2, 3)])
            assert heard == [1, 2]
            await upstream.answer([PullReply(number, completion(1))])
            await asked
        assert [(wanted.request is None, wanted.enough) for wanted in told] == [(False, False), (True, True)]

    asyncio.run(main())


def test_a_listener_that_cannot_begin_again_fails_and_the_controller_may_stop() -> None:
    async def main() -> None:
        def on_restart() -> None:
            raise EngineFailed("too late")

        upstream = Upstream()
        with pulling(upstream) as told:
            asked = asyncio.create_task(upstream.generate(request(0), TokenStream(1, lambda tokens: False, on_restart)))
            await turns()
            await upstream.answer([PullReply(told[0].number, restart=True)])
            with pytest.raises(EngineFailed, match="too late"):
                await asked
        assert (told[-1].request, told[-1].enough) == (None, False)

    asyncio.run(main())
