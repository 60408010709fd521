"""One vLLM server prefills, another decodes; the KV goes from the one to the other by NIXL."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_fleet import NEEDS_VLLM, START_S, Fronted, Versions, fronted, request

from rollart.core.types import Completion, GenerationRequest
from rollart.engines.vllm.kv_transfer import KVOffer, KVOfferRequest, KVOffers, PendingTransfers
from rollart.launch.local import LocalLauncher


def test_a_note_is_given_once_and_only_to_who_has_the_version_that_made_the_kv() -> None:
    async def body() -> None:
        offers = KVOffers()
        for name in ("a", "b"):
            offers.begin(name, 1.0)
            offers.keep(name, KVOffer({"block": 1}, version=3))
        assert await offers.take(KVOfferRequest("a", 4)) is None
        assert await offers.take(KVOfferRequest("b", 3)) == KVOffer({"block": 1}, 3)
        assert await offers.take(KVOfferRequest("b", 3)) is None
        assert await offers.take(KVOfferRequest("c", 3)) is None

    asyncio.run(body())


def test_a_swap_waits_until_kv_under_way_has_arrived_and_no_longer() -> None:
    async def body() -> None:
        offers = KVOffers()
        offers.begin("a", 60.0)
        offers.keep("a", KVOffer({}, 1))
        await offers.take(KVOfferRequest("a", 1))
        draining = asyncio.create_task(offers.drained())
        await asyncio.sleep(0)
        assert not draining.done()
        await offers.received("a")
        await asyncio.wait_for(draining, 10)

    asyncio.run(body())


def test_what_never_ends_is_waited_for_only_as_long_as_it_may_take() -> None:
    async def body() -> None:
        underway = PendingTransfers()
        underway.add("lost", 0.01)
        await asyncio.wait_for(underway.over(), 10)

    asyncio.run(body())


def prompt(name: str, length: int) -> GenerationRequest:
    return request(name, [5 + (at * 7 + length) % 90 for at in range(length)], max_tokens=16, seed=length)


@NEEDS_VLLM
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_transferred_kv_gives_the_same_tokens_and_never_meets_other_weights(tmp_path: Path) -> None:
    versions = Versions.made(tmp_path)

    async def transferred(a: Fronted, b: Fronted, asked: GenerationRequest) -> Completion:
        await a.engine.prefill(asked)
        return await b.engine.generate(replace(asked, kv_from=a.engine.url))

    async def conversation(a: Fronted, b: Fronted) -> None:
        before = await b.engine.status()
        for length in (40, 100, 300):
            asked = prompt(f"transferred {length}", length)
            made = await transferred(a, b, asked)
            assert made.fetched == length - 1 and versions.worst(asked, made) <= 1e-4
            alone = await a.engine.generate(replace(asked, id=f"alone {length}"))
            assert made.tokens == alone.tokens
        computed = (await b.engine.status()).prefilled - before.prefilled
        assert computed <= 3, "the decoding server computed prompts itself"

    async def swaps(a: Fronted, b: Fronted) -> None:
        """With hand-overs under way on both sides; they end, with logprobs of the versions that they name."""
        asked = [prompt(f"under way {index}", 60 + index) for index in range(6)]
        running = [asyncio.create_task(transferred(a, b, one)) for one in asked]
        versions.publish(1)
        await asyncio.gather(a.engine.load(versions.published(1)), b.engine.load(versions.published(1)))
        for one, made in zip(asked, await asyncio.gather(*running), strict=True):
            assert versions.worst(one, made) <= 1e-4

    async def body() -> None:
        launcher = LocalLauncher()
        async with (
            fronted(versions, tmp_path, "a", launcher, kv_transfer=True) as a,
            fronted(versions, tmp_path, "b", launcher, kv_transfer=True) as b,
        ):
            await conversation(a, b)
            await swaps(a, b)
            asked = prompt("prefilled by one that is gone", 90)
            await a.engine.prefill(asked)
            a.started.kill()
            await a.started.wait()
            made = await b.engine.generate(replace(asked, kv_from=a.engine.url))
            assert made.fetched == 0 and versions.worst(asked, made) <= 1e-4

    asyncio.run(asyncio.wait_for(body(), 2 * START_S))
