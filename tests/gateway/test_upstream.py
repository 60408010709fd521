"""Requests that wait for the controller to pull them."""

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
    """All that the controller pulls while the block runs."""
    pulled: list[PullRequest] = []

    def send(item: object) -> None:
        assert isinstance(item, PullRequest)
        pulled.append(item)

    task = asyncio.create_task(upstream.pull(send))
    try:
        yield pulled
    finally:
        task.cancel()


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_requests_are_pulled_once_and_replied_to_in_any_order() -> None:
    async def main() -> None:
        upstream = Upstream()
        tasks = [asyncio.create_task(upstream.generate(request(number))) for number in range(2)]
        await turns()
        with pulling(upstream) as pulled:
            await turns()
            tasks.append(asyncio.create_task(upstream.generate(request(2))))
            await turns()
        assert [item.request and item.request.tokens for item in pulled] == [[0], [1], [2]]
        await upstream.reply([PullReply(item.number, completion(item.number + 10)) for item in reversed(pulled)])
        answers = await asyncio.gather(*tasks)
        assert [answer.tokens[0] - 10 for answer in answers] == [item.number for item in pulled]
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
        task = asyncio.create_task(upstream.generate(request(0)))
        await turns()
        with pulling(upstream) as pulled:
            await turns()
        assert len(pulled) == 1
        task.cancel()

    asyncio.run(main())


def test_a_cancelled_request_is_pulled_as_such_and_a_late_reply_is_dropped() -> None:
    async def main() -> None:
        upstream = Upstream()
        with pulling(upstream) as pulled:
            task = asyncio.create_task(upstream.generate(request(0)))
            await turns()
            task.cancel()
            await asyncio.wait([task])
        item, cancelled = pulled
        assert (cancelled.number, cancelled.request, cancelled.stop) == (item.number, None, False)
        await upstream.reply([PullReply(item.number, completion(1))])

    asyncio.run(main())


def test_a_failure_of_the_engines_reaches_the_caller_with_its_reason() -> None:
    async def main() -> None:
        upstream = Upstream()
        with pulling(upstream) as pulled:
            task = asyncio.create_task(upstream.generate(request(0, "task-000001.3")))
            await turns()
        assert pulled[0].episode == "task-000001.3"
        await upstream.reply([PullReply(pulled[0].number, error="none is left")])
        with pytest.raises(EngineFailed, match="none is left"):
            await task

    asyncio.run(main())


def test_a_stream_gets_tokens_until_it_stops_which_is_pulled_once() -> None:
    async def main() -> None:
        upstream, tokens_seen = Upstream(), []

        def on_tokens(tokens: list[int]) -> bool:
            tokens_seen.extend(tokens)
            return len(tokens_seen) >= 2

        with pulling(upstream) as pulled:
            stream = TokenStream(1, on_tokens)
            task = asyncio.create_task(upstream.generate(request(0), stream))
            await turns()
            number = pulled[0].number
            assert pulled[0].every == 1
            await upstream.reply([PullReply(number, tokens=[token]) for token in (1, 2, 3)])
            assert tokens_seen == [1, 2]
            await upstream.reply([PullReply(number, completion(1))])
            await task
        assert [(item.request is None, item.stop) for item in pulled] == [(False, False), (True, True)]

    asyncio.run(main())


def test_a_stream_that_fails_ends_and_the_request_is_cancelled() -> None:
    async def main() -> None:
        def on_tokens(tokens: list[int]) -> bool:
            raise EngineFailed("too late")

        upstream = Upstream()
        with pulling(upstream) as pulled:
            task = asyncio.create_task(upstream.generate(request(0), TokenStream(1, on_tokens)))
            await turns()
            await upstream.reply([PullReply(pulled[0].number, tokens=[1])])
            with pytest.raises(EngineFailed, match="too late"):
                await task
        assert (pulled[-1].request, pulled[-1].stop) == (None, False)

    asyncio.run(main())
