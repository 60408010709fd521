"""A server that someone else runs: driven by its address, left as it is."""

import asyncio
from pathlib import Path

import pytest
from vllm_fleet import DEADLINE_S, NEEDS_VLLM, START_S, Versions, begun, fronted, request, spec_of

from rollart.core.errors import ServiceError
from rollart.engines.vllm.server import started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@NEEDS_VLLM
def test_a_server_given_by_its_address_gets_the_weights_of_the_run_and_outlives_it(tmp_path: Path) -> None:
    versions = Versions.made(tmp_path)
    asked = request("1", [5 + at % 90 for at in range(60)], max_tokens=12, seed=1)

    async def body() -> None:
        async with started(spec_of(versions)) as (_, url):
            async with fronted(versions, tmp_path, url=url) as first:
                made = await first.engine.generate(asked)
                assert set(made.versions) == {0} and versions.worst(asked, made) <= 1e-4
                versions.publish(5)
                await first.engine.load(versions.published(5))
                made = await first.engine.generate(asked)
                assert set(made.versions) == {5} and versions.worst(asked, made) <= 1e-4
            # A run that comes later finds weights there that are not its own.
            async with fronted(versions, tmp_path, url=url, config={"on_swap": "drain"}) as second:
                assert (await second.engine.status()).version == 0
                made = await second.engine.generate(asked)
                assert set(made.versions) == {0} and versions.worst(asked, made) <= 1e-4
                # It wants requests to end before a swap.
                long = request("2", asked.tokens, max_tokens=300, seed=1)
                (running,) = await begun(second.engine, long)
                versions.publish(6)
                await second.engine.load(versions.published(6))
                assert set((await running).versions) == {0}
                assert set((await second.engine.generate(asked)).versions) == {6}

    asyncio.run(asyncio.wait_for(body(), START_S))


def test_an_address_where_no_server_is_gives_one_sentence(tmp_path: Path) -> None:
    versions = Versions.made(tmp_path)

    async def body() -> None:
        async with fronted(versions, tmp_path, url="http://127.0.0.1:9"):
            pass

    with pytest.raises(ServiceError, match=r"^no vLLM server answers at http://127\.0\.0\.1:9$"):
        asyncio.run(asyncio.wait_for(body(), DEADLINE_S))
